"""Ranks that die, come back, and gateways that are restarted."""
import signal
import time

import pytest

from client import Stream, run
from conftest import SLOWDOWN, wait_for


def rank_state(server, rank: int) -> str:
    import json
    groups = json.loads(server.get("/health")[1])["groups"]
    return groups[0]["ranks"][rank]["state"]


def test_one_of_two_ranks_dies_under_load(stack):
    server = stack.start(ranks=2, rank_args=["--sim-step-us", "20000"])
    streams = [Stream(server.port, {"prompt": f"p{i}", "max_tokens": 200, "ignore_eos": True}) for i in range(64)]
    run(streams, until=lambda: all(len(s.raw) > 1500 for s in streams))
    stack.ranks[1].popen.kill()
    died = time.monotonic()
    run(streams)
    whole = [s for s in streams if s.done()]
    cut = [s for s in streams if s.error()]
    assert len(whole) == 32 and len(cut) == 32
    assert all(len(s.text()) == 200 for s in whole)
    assert max(s.closed_at for s in cut) - died < 1.0 * SLOWDOWN
    assert rank_state(server, 1) == "dead"
    assert server.get("/health")[0] == 200
    # New work only goes to the rank that lives.
    for _ in range(20):
        assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2, "ignore_eos": True})[0] == 200
    server.wait_idle()
    # The same rank, started again by hand, serves.
    stack.rank(1, args=["--sim-step-us", "1000"])
    wait_for("rank 1 live again", lambda: rank_state(server, 1) == "live", 10)
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 30, "ignore_eos": True}) for _ in range(20)]
    run(streams)
    assert all(len(s.text()) == 30 for s in streams)


def test_requests_without_a_token_move_to_the_other_rank(stack):
    server = stack.gateway(ranks=2)
    held = stack.rank(0, "script", ["--max-num-seqs", "64"])
    server_rank = stack.rank(1, "sim")
    server.wait_ready()
    wait_for("both live", lambda: rank_state(server, 0) == rank_state(server, 1) == "live", 10)
    held.tell({"rule": {"tokens": [97], "hold": True}})
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 5, "ignore_eos": True}) for _ in range(20)]
    # The sim rank answers at once; what went to the other one stays there without a token.
    def on_held() -> int:
        return int(server.metric("rankgate_in_flight", rank="0"))

    run(streams, until=lambda: sum(s.closed_at is not None for s in streams) + on_held() == 20)
    moving = on_held()
    assert moving > 0
    held.popen.kill()
    run(streams, seconds=10)
    assert all(s.done() and len(s.text()) == 5 for s in streams), [s.error() for s in streams]
    assert server.metric("rankgate_retries_total") == moving
    assert server_rank.popen.poll() is None
    server.wait_idle()


def test_a_rank_that_dies_idle_gets_nothing_and_all_dead_is_said_at_once(stack):
    server = stack.start(ranks=2)
    stack.ranks[0].popen.kill()
    wait_for("rank 0 known dead", lambda: rank_state(server, 0) == "dead", 2)
    for _ in range(20):
        assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2, "ignore_eos": True})[0] == 200
    stack.ranks[1].popen.kill()
    wait_for("not ready", lambda: server.get("/readiness")[0] == 503, 2)
    begin = time.monotonic()
    status, body = server.post("/v1/completions", {"model": "m", "prompt": "x"})
    assert status == 503 and body["error"]["code"] == "service_unavailable"
    assert time.monotonic() - begin < 1 * SLOWDOWN
    assert server.get("/liveness")[0] == 200
    assert server.get("/health")[0] == 503


def test_the_first_request_the_instant_it_is_ready(stack):
    server = stack.gateway()
    for _ in range(10):
        rank = stack.rank(0)
        server.wait_ready()
        status, body = server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert status == 200 and len(body["choices"][0]["text"]) == 3
        rank.popen.kill()
        rank.popen.wait()
        wait_for("seen", lambda: server.get("/readiness")[0] == 503, 3)


def test_a_group_whose_engine_never_comes_delays_nobody(stack):
    server = stack.start()
    status, added = server.post("/workers", {"name": "late", "model": "other", "dp_size": 2})
    assert status == 201
    for _ in range(20):
        begin = time.monotonic()
        assert server.post("/v1/completions", {"model": "other", "prompt": "x"})[0] == 503
        assert time.monotonic() - begin < 1 * SLOWDOWN
        assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1})[0] == 200
    import http.client
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("DELETE", "/workers/late")
    assert connection.getresponse().status == 200
    # The same address binds again at once.
    port = int(added["address"].rsplit(":", 1)[1])
    assert server.post("/workers", {"name": "late", "model": "other", "dp_size": 1, "rpc_port": port})[0] == 201


def test_a_killed_gateway_finds_its_engines_again(stack):
    sockets = stack.folder / "s"
    server = stack.gateway("--socket-dir", str(sockets), ranks=2)
    for index in range(2):
        stack.rank(index, args=["--sim-step-us", "5000"])
    server.wait_ready()
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}) for _ in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    server.popen.kill()
    server.popen.wait()
    again = stack.gateway("--socket-dir", str(sockets), ranks=2)
    again.wait_ready(15)
    status, body = again.post("/v1/completions", {"model": "m", "prompt": "y", "max_tokens": 5, "ignore_eos": True})
    assert status == 200 and len(body["choices"][0]["text"]) == 5
    wait_for("the old requests end", lambda: again.metric("vllm:num_requests_running") == 0, 10)
    assert all(rank.popen.poll() is None for rank in stack.ranks)


@pytest.mark.parametrize("fault,state", [("die", "dead"), ("deaf", "deaf"), ("mute", "mute")])
def test_each_way_to_be_lost_has_its_name(stack, fault, state):
    server = stack.start(runner="script", ranks=2)
    stack.ranks[1].tell({"do": fault})
    wait_for(f"rank 1 {state}", lambda: rank_state(server, 1) == state, 5)
    for _ in range(10):
        assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2})[0] == 200


def test_a_stopped_rank_is_found_and_comes_back(stack):
    server = stack.start(ranks=2)
    stack.ranks[1].popen.send_signal(signal.SIGSTOP)
    try:
        wait_for("rank 1 wedged", lambda: rank_state(server, 1) == "wedged", 6)
        for _ in range(10):
            assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2, "ignore_eos": True})[0] == 200
    finally:
        stack.ranks[1].popen.send_signal(signal.SIGCONT)
    wait_for("rank 1 live again", lambda: rank_state(server, 1) == "live", 6)
