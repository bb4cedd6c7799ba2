"""What the field taught (docs/field-cases.md), where only real processes show it."""
import concurrent.futures
import itertools
import json
import random
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest

from client import Stream, run
from conftest import SLOWDOWN, program, wait_for
from rankgate_process import ROOT

LONG_RUN = 500_000 if SLOWDOWN == 1 else 50_000
MODEL = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "n\u00e9 \uc0bc\uacb9\uc0b4 \U0001f469\u200d\U0001f469\u200d\U0001f467 \ud55c ok, and the rest of it"


def test_whole_and_streamed_agree_for_every_mix_of_choices_stops_scores_and_echo(stack):
    """One byte a token: every character is split over tokens, every stop string over several."""
    server = stack.start(runner="script", rank_args=["--max-num-seqs", "64"])
    stack.ranks[0].tell({"rule": {"tokens": list(TEXT.encode()), "finish": "stop"}})
    count = 0
    for n, stop, keep, scores, echo, usage, chat in itertools.product(
            (1, 3), (None, ["\uacb9"], ["zzz", "ok, a"], ["rest of it!"]), (False, True), (None, 0, 2), (False, True), (False, True), (False, True)):
        if chat and echo:
            continue
        body = {"model": "m", "max_tokens": 200, "n": n, "stop": stop, "include_stop_str_in_output": keep}
        if chat:
            body |= {"messages": [{"role": "user", "content": "x"}]}
            if scores is not None:
                body |= {"logprobs": True, "top_logprobs": scores}
        else:
            body |= {"prompt": "Q\u00e9", "echo": echo, "logprobs": scores}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        status, whole = server.post(path, body)
        assert status == 200, (body, whole)
        cut = TEXT
        for one in stop or []:
            at = TEXT.find(one)
            if at >= 0:
                cut = cut[:min(len(cut), at + (len(one) if keep else 0))]
        text = {i: "" for i in range(n)}
        finish, tokens, usages = {}, {i: [] for i in range(n)}, []
        for event in server.stream(path, {**body, "stream_options": {"include_usage": usage}}):
            usages += [event["usage"]] if event.get("usage") else []
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content", "") if chat else choice["text"]
                text[choice["index"]] += piece
                scored = choice.get("logprobs")
                assert piece or scored or choice["finish_reason"] or (chat and choice["delta"].get("role")), "an empty event while text is held"
                if scored:
                    tokens[choice["index"]] += [entry["logprob"] for entry in scored["content"]] if chat else scored["token_logprobs"]
                if choice["finish_reason"]:
                    assert choice["index"] not in finish
                    finish[choice["index"]] = choice["finish_reason"]
        assert len(usages) == usage
        if usages:
            # Where the prompt is cached may differ, what was counted may not.
            assert [usages[0][k] for k in ("prompt_tokens", "completion_tokens")] == [whole["usage"][k] for k in ("prompt_tokens", "completion_tokens")]
        assert [choice["index"] for choice in whole["choices"]] == list(range(n))
        for choice in whole["choices"]:
            i = choice["index"]
            shown = choice["message"]["content"] if chat else choice["text"]
            assert shown == text[i] == ("Q\u00e9" if echo else "") + cut, (body, shown, text[i])
            assert choice["finish_reason"] == finish[i] == "stop"
            if scores is not None:
                entries = choice["logprobs"]
                assert tokens[i] == ([entry["logprob"] for entry in entries["content"]] if chat else entries["token_logprobs"]), body
        count += 1
    assert count == 288
    server.wait_idle()


def test_echo_caps_and_scores_agree_in_every_mix(stack):
    """The legacy logprobs of completions: as many entries as tokens, offsets in characters, null for the first token of all."""
    server = stack.start()
    for echo, cap, scores, n, stream in itertools.product((False, True), (0, 1, 3), (None, 0, 2), (1, 2), (False, True)):
        body = {"model": "m", "prompt": ["Q\u00e9", "abc"], "echo": echo, "max_tokens": cap, "logprobs": scores, "n": n, "ignore_eos": True}
        if not stream:
            status, reply = server.post("/v1/completions", body)
        else:
            events = list(server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
            status, reply = events[0].get("status", 200), {"choices": [], "usage": None}
            for i in range(2 * n if status == 200 else 0):
                mine = [c for e in events for c in e.get("choices", []) if c["index"] == i]
                parts = [c["logprobs"] for c in mine if c["logprobs"]]
                reply["choices"].append({
                    "index": i, "text": "".join(c["text"] for c in mine), "finish_reason": [c["finish_reason"] for c in mine if c["finish_reason"]],
                    "logprobs": {key: sum((part[key] for part in parts), []) for key in parts[0]} if parts else None})
                reply["usage"] = next(e["usage"] for e in events if e.get("usage"))
        if cap == 0 and not echo:
            assert status == 400, body
            continue
        assert status == 200, (body, reply)
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (6, cap * 2 * n), body
        for i, choice in enumerate(reply["choices"]):
            prompt = "Q\u00e9" if i < n else "abc"
            shown = prompt if echo else ""
            assert choice["index"] == i and choice["text"].startswith(shown) and len(choice["text"]) == len(shown) + cap, (body, choice)
            assert choice["finish_reason"] in ("length", ["length"])
            if scores is None:
                assert choice["logprobs"] is None
                continue
            table = choice["logprobs"]
            assert {len(column) for column in table.values()} == {(3 if echo else 0) + cap}, (body, table)
            assert table["text_offset"] == sorted(table["text_offset"]) and table["text_offset"][0] == 0
            if echo:
                assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
            for lp, top in list(zip(table["token_logprobs"], table["top_logprobs"], strict=True))[1 if echo else 0:]:
                # The sampled token is always among them.
                assert isinstance(lp, float) and len(top) == max(scores, 1), (body, table)


def test_random_ids_beside_ordinary_streams_disturb_nobody(stack):
    """Bytes in any order are no text; ids above the tokenizer's last one are no text either."""
    server = stack.start(runner="script", rank_args=["--max-num-seqs", "64"])
    rng = random.Random(7)
    odd = [rng.choice([rng.randrange(256), 0x80, 0xe2, 0xf0]) for _ in range(3000)]
    stack.ranks[0].tell({"rule": {"prompt": list(b"odd"), "tokens": odd, "finish": "length"}})
    stack.ranks[0].tell({"rule": {"tokens": list(TEXT.encode()), "finish": "stop", "every_ms": 2}})
    strange = [Stream(server.port, {"prompt": "odd", "max_tokens": 3500}) for _ in range(2)]
    good = [Stream(server.port, {"prompt": f"p{i}", "max_tokens": 200}) for i in range(20)]
    run(good + strange, seconds=60 * SLOWDOWN)
    assert all(s.done() and s.text() == TEXT for s in good)
    for stream in strange:
        assert stream.done() and stream.text() == bytes(odd).decode("utf-8", "replace")
    whole = server.post("/v1/completions", {"model": "m", "prompt": "odd", "max_tokens": 3500})[1]
    assert whole["choices"][0]["text"] == strange[0].text()
    server.wait_idle()


def test_every_ending_is_counted_once_and_leaves_the_gauges_at_zero(stack):
    server = stack.start(runner="script", ranks=2, rank_args=["--max-num-seqs", "512"])
    each = 50
    for rank in stack.ranks:
        for prompt, rule in {"stop": {"tokens": [97, 98], "finish": "stop"}, "long": {"tokens": [97] * 9, "repeat": True},
                             "aborted": {"tokens": [97], "finish": "abort"}, "broken": {"tokens": [], "finish": "error"},
                             "held": {"tokens": [97], "hold": True}, "slow": {"tokens": [97] * 999, "every_ms": 20}}.items():
            rank.tell({"rule": {"prompt": list(prompt.encode()), **rule}})
    status = {"stop": 200, "long": 200, "aborted": 500, "broken": 500}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for prompt, wanted in status.items():
            got = list(pool.map(lambda _, p=prompt: server.post("/v1/completions", {"model": "m", "prompt": p, "max_tokens": 3})[0], range(each)))
            assert got == [wanted] * each, (prompt, got)
        assert all(s == 400 for s in pool.map(lambda _: server.post("/v1/completions", {"model": "m", "prompt": "x", "n": 0})[0], range(each)))
        pages = list(pool.map(lambda _: server.get("/metrics")[1], range(50)))
        assert all(page.startswith(b"# HELP") and page.endswith(b"\n") for page in pages)
    for prompt in ("held", "slow"):  # before the first token, and after it
        streams = [Stream(server.port, {"prompt": prompt, "max_tokens": 999}) for _ in range(each)]
        wait_for("all on the ranks", lambda: server.metric("rankgate_in_flight") == each, 20)
        if prompt == "slow":
            run(streams, until=lambda: all(s.first_at for s in streams))
        for stream in streams:
            stream.sock.close()
        server.wait_idle(5)
    # A rank is killed with a known load; what had not begun moves, the rest ends with an error.
    streams = [Stream(server.port, {"prompt": "slow", "max_tokens": 40}) for _ in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    stack.ranks[1].popen.kill()
    run(streams, seconds=20 * SLOWDOWN)
    lost = sum(not s.done() for s in streams)
    assert lost == 10 and all(s.error()["code"] == "rank_lost" for s in streams if not s.done())
    server.wait_idle(5)
    ended = {reason: server.metric("vllm:request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": each, "length": each + 10, "abort": 3 * each, "error": each + lost}, "the engine's own aborts are aborts"
    assert server.metric("rankgate_aborts_total", cause="client_gone") == 2 * each
    assert server.metric("rankgate_http_responses_total", status="400") == each
    # 10 streams of the dead rank, and it has no load any more.
    wait_for("the dead rank is named", lambda: server.metric("rankgate_rank_state", rank="1", state="dead") == 1, 3)
    page = server.get("/metrics")[1].decode()
    assert not [line for line in page.splitlines() if line.startswith("vllm:num_requests_running") and 'engine="1"' in line]


def test_a_client_that_leaves_takes_every_choice_of_every_prompt_along(stack):
    server = stack.start(runner="script", rank_args=["--max-num-seqs", "64"])
    stack.ranks[0].tell({"rule": {"prompt": list(b"aa"), "tokens": [97], "finish": "stop"}})
    stack.ranks[0].tell({"rule": {"prompt": list(b"bb"), "tokens": [98], "repeat": True, "every_ms": 20}})
    stream = Stream(server.port, {"prompt": ["bb", "aa", "bb"], "n": 2, "max_tokens": 3000})
    def ended() -> int:
        return int(server.metric("vllm:request_success_total", finished_reason="stop"))
    run([stream], until=lambda: ended() == 2 and server.metric("rankgate_in_flight") == 4)
    # The choices of the second prompt have ended, under their own numbers.
    finished = {c["index"] for e in stream.events() if isinstance(e, dict) for c in e["choices"] if c["finish_reason"]}
    assert finished == {2, 3}
    stream.sock.close()
    wait_for("four aborts", lambda: server.metric("rankgate_aborts_total", cause="client_gone") == 4, 1)
    server.wait_idle()
    wait_for("the engine is empty", lambda: server.metric("vllm:num_requests_running") == 0, 3)


def test_a_dying_word_of_a_rank_ends_its_requests_at_once(stack):
    server = stack.start(runner="script", ranks=2, rank_args=["--max-num-seqs", "64"])
    for rank in stack.ranks:
        rank.tell({"rule": {"tokens": [97], "repeat": True, "every_ms": 10}})
    streams = [Stream(server.port, {"prompt": f"p{i}", "max_tokens": 150}) for i in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    stack.ranks[0].tell({"do": "last_words"})
    said = time.monotonic()
    run(streams, seconds=20 * SLOWDOWN)
    cut = [s for s in streams if s.error()]
    assert len(cut) == 10 and max(s.closed_at for s in cut) - said < 1.0 * SLOWDOWN
    assert all(s.done() and len(s.text()) == 150 for s in streams if s not in cut)
    assert json.loads(server.get("/health")[1])["groups"][0]["ranks"][0]["state"] == "dead"
    assert server.metric("rankgate_rank_state", rank="0", state="dead") == 1


def test_the_smallest_rank_sets_the_context_length(stack):
    server = stack.gateway(ranks=2)
    stack.rank(0, args=["--max-model-len", "200"])
    stack.rank(1, args=["--max-model-len", "100"])
    server.wait_ready()
    wait_for("both live", lambda: json.loads(server.get("/health")[1])["groups"][0]["live"] == 2, 20)

    def ask(prompt, **more):
        return server.post("/v1/completions", {"model": "m", "prompt": prompt, "ignore_eos": True, **more})

    for prompt, more, param in (("x" * 100, {}, "prompt"), ("x" * 101, {}, "prompt"), ("x" * 99, {"max_tokens": 2}, "max_tokens"),
                                ("x" * 50, {"max_tokens": 51}, "max_tokens"), ([97] * 101, {}, "prompt")):
        status, reply = ask(prompt, **more)
        assert status == 400, (len(prompt), more, reply)
        error = reply["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "maximum context length is 100 tokens" in error["message"] and str(len(prompt)) in error["message"]
    assert server.metric("vllm:prompt_tokens_total") == 0, "nothing went to a rank"
    for prompt, more, made in (("x" * 99, {"max_tokens": 1}, 1), ("x" * 50, {"max_tokens": 50}, 50)):
        status, reply = ask(prompt, **more)
        assert status == 200 and reply["usage"]["completion_tokens"] == made
        assert reply["choices"][0]["finish_reason"] == "length"
    status, reply = server.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    assert reply["usage"]["total_tokens"] == 100, "without a cap: the room that is left"


def test_the_prompt_of_a_second_turn_begins_with_the_first_ones_tokens(stack):
    server = stack.start()
    turn = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "weather in K\u00f6ln?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"K\u00f6ln\", \"days\": [1, 2.50]}"}},
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": ""}}]}
    tools = [{"role": "tool", "tool_call_id": "c1", "content": "rain"}, {"role": "tool", "tool_call_id": "c2", "content": "noon"}]

    def tokens(messages, prompt=True):
        status, reply = server.post("/tokenize", {"model": "m", "messages": messages, "add_generation_prompt": prompt})
        assert status == 200, reply
        return reply["tokens"]

    history = [turn, turn + [call] + tools, turn + [call] + tools + [{"role": "assistant", "content": "Rain at noon."},
                                                                     {"role": "user", "content": "Thanks"}]]
    for shorter, longer in itertools.pairwise(history):
        # What the engine has in its cache after a turn is found again in the next one.
        first = tokens(shorter)
        assert tokens(longer)[:len(first)] == first


def test_log_lines_are_valid_whatever_a_client_sends(stack):
    server = stack.start("--log-format", "json", "--log-level", "debug")
    junk = [b"\xff\xfe", b"\xc0\x80", b"\x1b[31m", b"\xed\xa0\x80", "\u2028".encode(), b"%0d%0aX: y", b'"', b"\\", b"\x00"]
    for bad in junk:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            body = b'{"model":"' + bad + b'","prompt":"' + bad + b'","' + bad + b'":1}'
            sock.sendall(b"GET /" + bad.replace(b"\x00", b"%00") + b" HTTP/1.1\r\nHost: t\r\nX-Request-Id: " + bad.replace(b"\x00", b"")
                         + b"\r\nUser-Agent: " + bad.replace(b"\x00", b"") + b"\r\n\r\n"
                         + b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            sock.settimeout(0.3 * SLOWDOWN)
            try:
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                pass
    server.post("/v1/completions", {"model": "m\n\x1b[2Jfake", "prompt": "x", "frob\nnicate": 1})
    server.stop()
    lines = server.log.read_bytes().decode("utf-8", "strict").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(events) > 5
    assert not any("\x1b" in line or "\x00" in line for line in lines)


@pytest.mark.skipif(not MODEL.exists(), reason=f"no model at {MODEL}: run scripts/fetch_model.sh")
def test_long_runs_without_a_break_delay_nobody(stack):
    """A real BPE tokenizer in front of a simulated engine: 16 prompts that are one run each, beside 20 streams and a probe."""
    server = stack.gateway("--tokenizer", str(MODEL), "--max-body-bytes", str(64 << 20))
    stack.rank(0, args=["--sim-vocab-size", "49152", "--sim-eos-token", "2", "--max-model-len", "2000000", "--num-gpu-blocks", "1000000",
                        "--sim-step-us", "20000", "--sim-first-token", "300", "--sim-last-token", "8000"])
    server.wait_ready()
    warm = server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2, "ignore_eos": True})
    assert warm[0] == 200, warm
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 150, "ignore_eos": True}) for _ in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    slowest, done = 0.0, threading.Event()

    def probe():
        nonlocal slowest
        with httpx.Client(base_url=server.root, timeout=30) as client:
            while not done.is_set():
                begin = time.monotonic()
                client.get("/health")
                slowest = max(slowest, time.monotonic() - begin)
                time.sleep(0.05)

    prober = threading.Thread(target=probe)
    prober.start()

    def ask(i: int) -> tuple[int, float]:
        unit = ["a", "_", " ", "\n", "1", "\u5b57", "ab", "\U0001f600"][i % 8]
        begin = time.monotonic()
        # Half of them hang up after a second, as browsers do.
        try:
            reply = httpx.post(server.root + "/v1/chat/completions", timeout=1 if i >= 8 else 120 * SLOWDOWN,
                               json={"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": unit * (LONG_RUN // len(unit.encode()))}]})
            return reply.status_code, time.monotonic() - begin
        except httpx.TimeoutException:
            return 0, time.monotonic() - begin

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    run(streams, seconds=60 * SLOWDOWN)
    done.set()
    prober.join()
    assert {status for status, _ in answers} <= {200, 400, 0} and [status for status, _ in answers[:8]].count(0) == 0
    assert max(took for _, took in answers) < 60 * SLOWDOWN
    assert all(s.done() for s in streams)
    assert slowest < 1.0 * SLOWDOWN, slowest
    server.wait_idle(10)
    assert server.metric("rankgate_prepare_queue") == 0


def can_unshare() -> bool:
    return bool(shutil.which("unshare") and shutil.which("ip")) and subprocess.run(
        ["unshare", "-n", "sh", "-c", "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && ip -6 addr show dev lo | grep -q ::1"],
        capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a network namespace with IPv6")
def test_serves_on_a_machine_that_has_only_ipv6(tmp_path):
    script = f"""
set -eu
ip link set lo up; ip addr del 127.0.0.1/8 dev lo
{program()} gateway :bytes: --served-model-name m --host ::1 --port 8000 --data-parallel-address ::1 --data-parallel-rpc-port 29550 >g.log 2>&1 &
g=$!
{program()} engine m --runner sim --sim-vocab-size 259 --sim-eos-token 257 --sim-first-token 97 --sim-last-token 122 --data-parallel-address ::1 \
    --max-model-len 4096 --load-page-dir "$PWD" >e.log 2>&1 &
e=$!
trap 'kill $g $e; wait' EXIT
for i in $(seq 300); do curl -gfs -o /dev/null 'http://[::1]:8000/readiness' && break; sleep 0.1; done
curl -gfs 'http://[::1]:8000/v1/completions' -H 'Content-Type: application/json' -d '{{"prompt":"x","max_tokens":3,"ignore_eos":true}}'
"""
    done = subprocess.run(["unshare", "-n", "bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120 * SLOWDOWN)
    logs = "".join((tmp_path / name).read_text() for name in ("g.log", "e.log") if (tmp_path / name).exists())
    assert done.returncode in (0, 143) and done.stdout, done.stderr + logs
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 3
    assert "http://[::1]:8000" in logs, "addresses are printed as they can be pasted"
