"""One rank as several processes: rank 0 owns the wire, the followers mirror it; losing one is an error, never a hang."""
import os
import pathlib
import signal
import time

import pytest
from frontend import ABORT, pack

TP = ("--tensor-parallel-size", "3")


def children(pid: int) -> list[int]:
    return [int(c) for c in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def leftovers() -> set[str]:
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return {n for n in os.listdir(base) if n.startswith("rankgate-tp-")}


def test_serves_the_same_tokens_and_ends_in_order(vllm, make_vllm):
    plain = make_vllm()
    plain.start(0)
    before = leftovers()
    process = vllm.start(0, *TP)
    assert vllm.facts[0]["tensor_parallel_size"] == 3 and vllm.facts[0]["world_size"] == 3
    followers = children(process.pid)
    assert len(followers) == 2
    for n in range(50):
        vllm.add(f"r{n}", prompt=(n + 1, 2, 3), max_tokens=1 + n)
    for n in range(0, 50, 7):
        vllm.send(ABORT, pack([f"r{n}"]))
    assert vllm.pump(20, lambda: sum(vllm.finish(f"r{n}") is not None for n in range(50)) >= 42)
    assert vllm.run("same", prompt=(9, 9, 9), max_tokens=30) == plain.run("same", prompt=(9, 9, 9), max_tokens=30)
    vllm.pump(1.5)  # idle rounds
    assert len(vllm.run("again")) == 4
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0 and vllm.dead == 0
    assert gone(followers) and leftovers() <= before


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_a_follower_is_last_words_not_a_hang(vllm, busy, how):
    process = vllm.start(0, *TP, "--tensor-parallel-stall-timeout", "1", "--sim-step-us", "2000")
    followers = children(process.pid)
    if busy:
        vllm.add("r", max_tokens=100000)
        assert vllm.pump(10, lambda: vllm.rows("r"))
    os.kill(followers[1], how)
    started = time.monotonic()
    assert vllm.pump(10, lambda: vllm.dead == 1), vllm.log(0)
    assert time.monotonic() - started < (2 if how == signal.SIGKILL else 5)
    assert process.wait(15) == 3
    assert "rank=2" in vllm.log(0) or "rank 2" in vllm.log(0), vllm.log(0)
    assert gone(followers)


def test_followers_go_when_the_leader_is_killed(vllm):
    before = leftovers()
    process = vllm.start(0, *TP)
    followers = children(process.pid)
    process.kill()
    assert gone(followers) and leftovers() <= before


def test_a_follower_that_never_joins_ends_the_start(vllm, tmp_path):
    process = vllm.start(0, *TP, "--tensor-parallel-join-timeout", "20", "--sim-step-us", "1000", wait=False)
    deadline = time.monotonic() + 10
    while not children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    code = process.wait(15)
    assert code in (1, 3), vllm.log(0)
