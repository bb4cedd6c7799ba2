"""Streams in numbers: complete, exact, and nothing left behind."""
import json
import os
import socket
import threading
import time

import httpx

from client import Stream, run
from conftest import SLOWDOWN, wait_for

# Sanitizer lanes run the same with less.
MANY = int(os.environ.get("E2E_STREAMS", "1000"))


def test_many_streams_complete_exactly_over_two_ranks_and_leave_nothing(stack):
    server = stack.start(ranks=2, rank_args=["--sim-step-us", "2000", "--max-num-seqs", "1024"])
    streams = [Stream(server.port, {"prompt": f"p{i}", "max_tokens": 20, "ignore_eos": True, "stream_options": {"include_usage": True}})
               for i in range(MANY)]
    run(streams)
    for stream in streams:
        assert stream.status == 200 and stream.done() and stream.error() is None
        assert len(stream.text()) == 20
        usages = [e["usage"] for e in stream.events() if isinstance(e, dict) and e.get("usage")]
        assert [u["completion_tokens"] for u in usages] == [20]
    server.wait_idle(5)
    assert server.metric("vllm:request_success_total", finished_reason="length") == MANY
    assert server.metric("vllm:generation_tokens_total") == MANY * 20
    wait_for("engines idle", lambda: server.metric("vllm:num_requests_running") == 0, 5)
    assert server.metric("rankgate_aborts_total") == 0
    spread = [server.metric("rankgate_late_outputs_total")]
    assert spread == [0]


def test_silent_streams_whose_clients_leave_are_aborted_within_a_second(stack):
    server = stack.start(runner="script", rank_args=["--max-num-seqs", "1024"])
    stack.ranks[0].tell({"rule": {"tokens": [97], "hold": True}})
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 50}) for _ in range(MANY)]
    wait_for("all of them on the rank", lambda: server.metric("rankgate_in_flight") == MANY, 30)
    wait_for("all of them running", lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == MANY, 10)
    for stream in streams:
        stream.sock.close()
    begin = time.monotonic()
    wait_for("all aborted", lambda: server.metric("rankgate_aborts_total", cause="client_gone") == MANY, 3, interval=0.02)
    assert time.monotonic() - begin < 1.5 * SLOWDOWN  # the limit is one second; the rest is the scrape
    server.wait_idle(3)
    wait_for("the engine has dropped them", lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0, 5)
    stack.ranks[0].tell({"do": "clear"})  # else the rule holds the next one too
    status, reply = server.post("/v1/completions", {"model": "m", "prompt": "y", "max_tokens": 1})
    assert status == 200, reply


def test_a_stop_string_over_token_borders_equals_the_whole_answer(stack):
    server = stack.start(runner="script")
    text = "caf\u00e9 XY\u00e9STOPtail"
    stack.ranks[0].tell({"rule": {"tokens": list(text.encode()), "finish": "stop"}})
    ask = {"model": "m", "prompt": "x", "max_tokens": 100, "stop": ["STOP"]}
    whole = server.post("/v1/completions", ask)[1]["choices"][0]
    streamed = Stream(server.port, ask)
    run([streamed])
    assert whole["text"] == "caf\u00e9 XY\u00e9" == streamed.text()
    assert whole["finish_reason"] == "stop"
    server.wait_idle()
    assert server.metric("rankgate_aborts_total", cause="stop_string") >= 1


def test_slow_and_silent_sockets_do_not_disturb_others(stack):
    server = stack.start(rank_args=["--sim-step-us", "1000"])
    sockets = []
    for i in range(2 * MANY):
        s = socket.create_connection(("127.0.0.1", server.port))
        if i % 3 == 1:
            s.sendall(b"POST /v1/compl")
        elif i % 3 == 2:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{")
        sockets.append(s)
    slowest = 0.0
    with httpx.Client(base_url=server.root, timeout=10) as client:
        for _ in range(40):
            begin = time.monotonic()
            reply = client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 4, "ignore_eos": True})
            slowest = max(slowest, time.monotonic() - begin)
            assert reply.status_code == 200
            for s in sockets[1::3][:20]:
                s.sendall(b"x")
    assert slowest < 1.0 * SLOWDOWN
    for s in sockets:
        s.close()
    server.wait_idle()


def test_long_prompts_stall_neither_probes_nor_streams(stack):
    server = stack.start("--max-body-bytes", str(64 << 20), rank_args=["--sim-step-us", "20000"])
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 150, "ignore_eos": True}) for _ in range(50)]
    stop = threading.Event()
    probes: list[float] = []

    def poll():
        with httpx.Client(base_url=server.root, timeout=30) as client:
            while not stop.is_set():
                begin = time.monotonic()
                client.get("/health")
                probes.append(time.monotonic() - begin)
                time.sleep(0.05)

    poller = threading.Thread(target=poll)
    poller.start()
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "prose and " * 2_700_000}]}
    raw = json.dumps(body).encode()
    answers: list[int] = []

    def send_long():
        answers.append(httpx.post(server.root + "/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"}, timeout=60).status_code)

    senders = [threading.Thread(target=send_long) for _ in range(8)]
    for sender in senders:
        sender.start()
    run(streams)
    for sender in senders:
        sender.join()
    stop.set()
    poller.join()
    assert answers == [400] * 8
    probes.sort()
    assert probes[int(len(probes) * 0.99) - 1] < 0.2 * SLOWDOWN, probes[-5:]
    assert all(len(s.text()) == 150 for s in streams)


def test_the_openapi_of_httpx_sees_keep_alive_survive_errors(stack):
    server = stack.start()
    with httpx.Client(base_url=server.root, timeout=10, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(20):
            assert client.post("/v1/completions", content=b"{").status_code == 400
            assert client.get("/nope").status_code == 404
            assert client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.metric("rankgate_connections_total") < 30
