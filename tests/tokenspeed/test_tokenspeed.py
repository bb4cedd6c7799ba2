"""Generated token k of a request whose prompt ends in token p is (p + 1 + k) mod 256; a first prompt token 400 + n ends it at token n."""
import json
import signal
import threading
import time

import pytest
from conftest import Group
from rankgate_process import wait_for


def text_of(group, **body):
    status, reply = group.complete(**body)
    assert status == 200, reply
    return reply["choices"][0]["text"]


def test_tokens_of_the_scripted_model_arrive_exactly(one):
    status, reply = one.complete()
    assert status == 200 and reply["usage"]["completion_tokens"] == 5 and reply["choices"][0]["finish_reason"] == "length", reply
    streamed, finish = "", []
    for event in one.gateway.stream("/v1/completions", {"model": "tiny", "prompt": [65], "max_tokens": 5}):
        if event.get("choices"):
            streamed += event["choices"][0]["text"]
            finish.append(event["choices"][0]["finish_reason"])
    assert streamed == reply["choices"][0]["text"] and finish[-1] == "length" and not any(finish[:-1])


def test_chat_streams_and_ends_with_eos(one):
    status, reply = one.gateway.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6})
    assert status == 200 and reply["usage"]["completion_tokens"] == 6, reply
    status, reply = one.complete(prompt=[403, 65], max_tokens=20)
    assert status == 200 and reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 4, reply


def test_stop_strings_and_stop_ids(one):
    full = text_of(one, max_tokens=10)
    status, reply = one.complete(max_tokens=10, stop=[full[3:5]])
    assert reply["choices"][0]["text"] == full[:3] and reply["choices"][0]["finish_reason"] == "stop", reply
    status, reply = one.complete(max_tokens=10, stop_token_ids=[68])
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 3, reply
    one.gateway.wait_idle()


def test_the_stop_reason_is_the_token_the_string_or_nothing(one):
    full = text_of(one, max_tokens=10)
    reason = lambda **body: one.complete(max_tokens=10, **body)[1]["choices"][0]["stop_reason"]  # noqa: E731
    assert reason(stop_token_ids=[68]) == 68
    assert reason(stop_token_ids=[3, 68, 70]) == 68
    assert reason(stop=[full[3:5]]) == full[3:5]
    assert reason(prompt=[403, 65]) is None, "EOS is not named"
    assert reason(stop_token_ids=[3]) is None, "the length ended it"
    last = [e for e in one.gateway.stream("/v1/completions", {"model": "tiny", "prompt": [65], "max_tokens": 9, "stop_token_ids": [68]})
            if e.get("choices")][-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", 68)


def test_nobody_had_to_declare_the_runtime(one):
    assert "--runtime" not in one.args and one.health()["runtime"] == "tokenspeed"


def test_a_restarted_gateway_finds_the_running_engine(two):
    for sig in (signal.SIGKILL, signal.SIGTERM):
        two.restart_gateway(sig)
        wait_for("both ranks", lambda: two.health()["live"] == 2, 20)
        assert two.health()["runtime"] == "tokenspeed"
        for rank in (0, 1):
            status, reply = two.complete(data_parallel_rank=rank, max_tokens=6)
            assert status == 200 and reply["usage"]["completion_tokens"] == 6, reply
    assert all(engine.popen.poll() is None for engine in two.engines.values())
    two.gateway.wait_idle()


def test_what_a_rank_said_last_does_not_keep_it_from_work(two):
    # The real engine samples before the finish: its last word names requests that are gone, and nobody corrects it.
    threads = [threading.Thread(target=two.complete, kwargs={"max_tokens": 30, "ignore_eos": True}) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    two.gateway.wait_idle()
    said = [two.gateway.metric("vllm:num_requests_running", engine=str(rank)) for rank in (0, 1)]
    assert max(said) > 0, "else this test shows nothing"
    pinned = [threading.Thread(target=two.complete, kwargs={"max_tokens": 60, "ignore_eos": True}) for _ in range(4)]
    for t in pinned:
        t.start()
    wait_for("both ranks have their share at once", lambda: [two.gateway.metric("rankgate_in_flight", rank=str(r)) for r in (0, 1)] == [2, 2], 5, 0.005)
    for t in pinned:
        t.join(60)
    two.gateway.wait_idle()


def test_n_choices_are_fanned_out(one):
    status, reply = one.complete(n=3, temperature=1.0, seed=5)
    assert status == 200 and [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 15


def test_logprobs_of_the_sampled_token(one):
    status, reply = one.complete(logprobs=0, max_tokens=4)
    if status == 400:
        assert reply["error"]["param"] == "logprobs"
    else:
        assert [round(v, 3) for v in reply["choices"][0]["logprobs"]["token_logprobs"]] == [-0.125, -0.25, -0.375, -0.5]


def test_a_client_that_leaves_frees_its_slot(two):
    events = two.gateway.stream("/v1/completions", {"model": "tiny", "prompt": [65], "max_tokens": 800, "ignore_eos": True})
    next(events)
    events.close()
    two.gateway.wait_idle(1.5)


FATAL = [
    ({"prompt": None}, "prompt"), ({"prompt": [65] * 5000, "max_tokens": 1}, None), ({"min_tokens": 9, "max_tokens": 5}, None), ({"top_k": 128}, "top_k"),
    ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [2**31]}, "prompt"), ({"prompt": [2**40]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [65] * 1023, "max_tokens": 1}, None), ({"prompt": [65] * 1022, "max_tokens": 1}, None), ({"prompt": [65] * 1024, "max_tokens": 1}, None),
    ({"stream_interval": 0}, "stream_interval"), ({"max_tokens": 0}, "max_tokens"), ({"prompt": [512]}, "prompt"), ({"n": 0}, "n"),
    ({"max_tokens": 2**40}, None),
]


@pytest.mark.parametrize("body,param", FATAL, ids=[json.dumps(row[0])[:50] for row in FATAL])
def test_what_kills_the_engine_is_refused_and_the_rank_lives(one, body, param):
    status, reply = one.complete(**body)
    assert status == 400, reply
    if param:
        assert reply["error"]["param"] == param, reply
    assert one.state(0) == "live"
    assert one.complete(max_tokens=1)[0] == 200


def test_the_longest_prompt_is_taken_and_one_more_token_is_not(one):
    longest = 1024 - 16 - 2  # the cache's tokens less a page, less what the scheduler keeps
    status, reply = one.complete(prompt=[65] * longest, max_tokens=1)
    assert status == 200 and reply["usage"]["prompt_tokens"] == longest, reply
    assert one.complete(prompt=[65] * (longest + 1), max_tokens=1)[0] == 400
    assert one.state(0) == "live" and one.engines[0].popen.poll() is None


def test_the_same_client_request_id_twice_never_reuses_a_wire_id(one):
    for _ in range(3):
        for _ in range(2):
            status, _ = one.gateway.post("/v1/completions", {"model": "tiny", "prompt": [65], "max_tokens": 1}, headers={"X-Request-Id": "same"})
            assert status == 200
    assert one.state(0) == "live"


def test_two_ranks_share_a_burst_and_are_told_apart(two):
    alone = [two.complete(prompt=[65 + i], max_tokens=40)[1]["choices"][0]["text"] for i in range(12)]
    assert len(set(alone)) == 12
    results = [None] * 12
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, two.complete(prompt=[65 + i], max_tokens=40))) for i in range(12)]
    for t in threads:
        t.start()
    wait_for("both ranks busy", lambda: two.gateway.metric("rankgate_in_flight", rank="0") > 3 and two.gateway.metric("rankgate_in_flight", rank="1") > 3, 5, 0.005)
    for t in threads:
        t.join(60)
    for i, (status, reply) in enumerate(results):
        assert status == 200 and reply["choices"][0]["text"] == alone[i], reply
    two.gateway.wait_idle()


def test_kill_fails_only_its_own_and_the_rank_rejoins(two):
    results = []
    threads = [threading.Thread(target=lambda: results.append(two.complete(max_tokens=300, ignore_eos=True))) for _ in range(8)]
    for t in threads:
        t.start()
    time.sleep(0.5)
    two.engines[1].stop(signal.SIGKILL)
    two.wait_state(1, "dead", 1.5)
    for _ in range(6):
        assert two.complete(max_tokens=2)[0] == 200
    for t in threads:
        t.join(60)
    codes = [status for status, _ in results]
    assert len(codes) == 8 and codes.count(200) >= 4 and all(c == 200 or c >= 500 for c in codes), codes
    two.spawn(1)
    two.wait_state(1, "live", 120)
    assert two.complete(data_parallel_rank=1)[0] == 200
    two.gateway.wait_idle()


def test_a_wrong_declaration_is_refused_loudly():
    group = Group(1, "wrong", runtime="vllm")
    try:
        group.spawn(0)
        wait_for("the gateway answers", group.answers, 20)
        wait_for("the refusal is in /health", lambda: group.health()["ranks"][0].get("reason", "").startswith("refused"), 120, 0.3)
        assert group.complete(timeout=10)[0] == 503
        assert group.gateway.get("/health")[0] == 503
        reason = group.health()["ranks"][0]["reason"]
        assert "tokenspeed" in reason and "vllm" in reason and "--runtime" in reason, reason
        assert reason in group.gateway.text()
    finally:
        group.stop()
