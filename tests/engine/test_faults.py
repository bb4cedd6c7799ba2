"""The script runner: a rank that says and does wrong what it is told, so that frontends can be tested against it."""
import json
import os
import socket
import time

import zmq
from frontend import pack


class Script:
    def __init__(self, frontend, *args):
        self.path = os.path.join(frontend.dir.name, "script")
        self.process = frontend.start(0, "--script-socket", self.path, *args, runner="script")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(self.path)
        self.file = self.socket.makefile("rw")

    def __call__(self, **command):
        self.file.write(json.dumps(command) + "\n")
        self.file.flush()
        answer = json.loads(self.file.readline())
        assert answer["ok"], answer
        return answer


def test_says_what_it_is_told_when_it_is_told(vllm):
    script = Script(vllm)
    script(rule={"id_prefix": "a", "tokens": [11, 12, 13], "finish": "stop", "stop_reason": 13, "every_ms": 50})
    script(rule={"id_prefix": "h", "tokens": [21], "finish": "length", "hold": True})
    script(rule={"prompt": [9, 9], "finish": "error"})
    started = time.monotonic()
    assert vllm.run("a1", max_tokens=100) == [11, 12, 13]
    assert time.monotonic() - started >= 0.1
    assert vllm.rows("a1")[-1][5:7] == [0, 13]
    vllm.add("held", max_tokens=100)
    assert not vllm.pump(0.3, lambda: vllm.rows("held"))
    assert vllm.utility("is_sleeping") is False, "a held request does not stop the rank"
    script(do="release")
    assert vllm.pump(5, lambda: vllm.finish("held") == 1)
    assert vllm.run("e", prompt=(9, 9, 9)) == [] and vllm.finish("e") == 3
    assert vllm.run("other", max_tokens=3) == [1000, 1001, 1002]
    assert script(get="state")["ids"] == ["a1", "held", "e", "other"]


def test_reads_a_script_file_and_refuses_a_bad_one(vllm, tmp_path):
    good = tmp_path / "good"
    good.write_text('# what to say\n{"rule": {"tokens": [5], "finish": "stop"}}\n')
    vllm.start(0, "--script", str(good), runner="script")
    assert vllm.run("r", max_tokens=9) == [5]
    bad = tmp_path / "bad"
    bad.write_text('{"rule": {"tokns": [5]}}\n')
    assert vllm.start(1, "--script", str(bad), runner="script", wait=False).wait(10) == 2
    assert "tokns" in vllm.log(1)
    nowhere = str(tmp_path / "missing" / "socket")
    assert vllm.start(2, "--script-socket", nowhere, runner="script", wait=False).wait(10) == 2
    assert f"--script-socket {nowhere}" in vllm.log(2)


def test_a_model_that_is_no_gguf_file_is_a_bad_flag(vllm, tmp_path):
    for name, content in (("page.html", b"<html>"), ("empty", b""), ("half", b"GG")):
        (tmp_path / name).write_bytes(content)
        model = str(tmp_path / name)
        assert vllm.start(0, model=model, runner="llama", wait=False).wait(10) == 2
        assert f"MODEL {model} is no GGUF file" in vllm.log(0), vllm.log(0)


def test_deaf_mute_and_wedged(make_vllm):
    deaf = make_vllm()
    script = Script(deaf)
    script(rule={"every_ms": 20})
    deaf.add("r", max_tokens=40)
    assert deaf.pump(5, lambda: deaf.rows("r"))
    script(do="deaf")
    assert deaf.pump(5, lambda: deaf.disconnected("input"))
    assert deaf.pump(10, lambda: deaf.finish("r") == 1), "a deaf rank finishes what runs"
    assert deaf.dead == 0 and script.process.poll() is None and not deaf.disconnected("output")

    mute = make_vllm()
    script = Script(mute)
    script(do="mute")
    assert mute.pump(5, lambda: mute.disconnected("output"))
    mute.add("r")
    assert not mute.pump(0.3, lambda: mute.rows("r")) and script.process.poll() is None and not mute.disconnected("input")

    wedged = make_vllm()
    script = Script(wedged)
    script(do="sleep", ms=3000)
    assert wedged.utility("is_sleeping", seconds=0.3) == "no reply"
    assert wedged.pump(20, lambda: any(m[4] for _, m in wedged.messages)), "answers when it comes back"


def test_dies_with_and_without_last_words(make_vllm):
    killed = make_vllm()
    script = Script(killed)
    script(rule={"tokens": [1, 2, 3, 4, 5], "at_token": 2, "then": {"do": "die"}, "every_ms": 30})
    killed.add("r", max_tokens=5)
    assert script.process.wait(10) == -9
    assert killed.pump(5, lambda: killed.disconnected("input") and killed.disconnected("output"))
    killed.pump(1, lambda: len(killed.tokens("r")) == 2)
    assert killed.tokens("r") == [1, 2] and killed.dead == 0

    worded = make_vllm()
    script = Script(worded)
    script(do="last_words")
    assert worded.pump(5, lambda: worded.dead == 1) and script.process.wait(10) == 3

    failed = make_vllm()
    script = Script(failed)
    script(do="fail_step")
    failed.add("r")
    assert failed.pump(5, lambda: failed.dead == 1) and script.process.wait(10) == 3
    assert "told to fail" in failed.log(0)


def test_garbage_duplicates_late_rows_and_a_wrong_identity(vllm):
    script = Script(vllm)
    raw = lambda *frames: script(do="raw", hex=[f.hex() for f in frames])  # noqa: E731
    late = pack([0, [["gone", [7], None, None, None, None]], None, 1.0])
    raw(late)
    raw(late)
    assert vllm.pump(5, lambda: vllm.tokens("gone") == [7, 7])
    script(do="identity", index=9)
    vllm.run("r")
    assert vllm.messages[-1][1][0] == 9
    raw(b"\xc1\xc1\xc1")
    time.sleep(0.2)
    frames = []
    while vllm.outs[0].poll(500):
        frames.append(vllm.outs[0].recv_multipart(zmq.NOBLOCK))
    assert [b"\xc1\xc1\xc1"] in frames


def test_silent_requests_are_in_the_reported_load(vllm):
    script = Script(vllm, "--max-num-seqs", "30")
    script(rule={"hold": True})
    for n in range(50):
        vllm.add(f"r{n}")
    loaded = lambda: vllm.stats() and (vllm.stats()["num_running_reqs"], vllm.stats()["num_waiting_reqs"]) == (30, 20)  # noqa: E731
    assert vllm.pump(5, loaded)
    script(do="release")
    assert vllm.pump(10, lambda: all(vllm.finish(f"r{n}") is not None for n in range(50)))
    assert (vllm.stats()["num_running_reqs"], vllm.stats()["num_waiting_reqs"]) == (0, 0)
