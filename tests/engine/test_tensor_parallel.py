"""One rank as several processes: rank 0 owns the wire, the followers mirror it; losing one is an error, never a hang."""
import os
import pathlib
import signal
import subprocess
import time

import pytest
from frontend import ABORT, pack, program

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
    """Names of tensor-parallel groups: files and sockets without one."""
    names = set(os.listdir(os.environ.get("XDG_RUNTIME_DIR") or "/tmp"))
    names |= {line.split()[-1] for line in pathlib.Path("/proc/net/unix").read_text().splitlines()}
    return {n for n in names if "rankgate-tp-" in n}


def held_in_the_start(vllm, *args):
    """Rank 0 waits in the join: a follower was stopped as soon as there was one."""
    process = vllm.start(0, *TP, *args, wait=False)
    deadline = time.monotonic() + 20
    while len(children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    followers = children(process.pid)
    while b"--relay-where" not in pathlib.Path(f"/proc/{followers[1]}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.0002)  # the fork of rank 0 is none of it yet
    os.kill(followers[1], signal.SIGSTOP)
    return process, followers


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
    process.wait()
    assert gone(followers) and leftovers() <= before


def test_a_follower_that_never_joins_ends_the_start(vllm, tmp_path):
    process = vllm.start(0, *TP, "--tensor-parallel-join-timeout", "20", "--sim-step-us", "1000", wait=False)
    deadline = time.monotonic() + 10
    while not children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    code = process.wait(15)
    assert code in (1, 3), vllm.log(0)


@pytest.mark.parametrize("wrong", [("--tensor-parallel-stall-timeout", "0.01"), ("--tensor-parallel-stall-timeout", "1e9"),
                                   ("--tensor-parallel-join-timeout", "1e9"), ("--tensor-parallel-join-timeout", "nan"),
                                   ("--tensor-parallel-size", "65"), ("--tensor-parallel-rank", "1"), ("--tensor-parallel-rank", "3")])
def test_a_flag_that_cannot_be_is_named(wrong):
    before = leftovers()
    argv = [program(), "engine", "m", "--runner", "sim", *TP, *wrong]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and wrong[0] in done.stderr, (done.returncode, done.stderr)
    assert leftovers() <= before


def test_a_leader_killed_in_the_start_leaves_nothing(vllm):
    before = leftovers()
    process, followers = held_in_the_start(vllm)
    process.kill()
    process.wait()
    assert gone(followers) and leftovers() <= before


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_an_interrupted_start_ends_in_time(vllm, number, code):
    """A Ctrl-C reaches all of them; one cannot even hear it."""
    before = leftovers()
    process, followers = held_in_the_start(vllm)
    started = time.monotonic()
    for pid in (*followers, process.pid):
        os.kill(pid, number)
    assert process.wait(20) == code, vllm.log(0)
    assert time.monotonic() - started < 10
    assert gone(followers) and leftovers() <= before


def test_a_follower_stopped_in_the_start_is_named(vllm):
    process, followers = held_in_the_start(vllm, "--tensor-parallel-join-timeout", "1.5")
    assert process.wait(20) == 1, vllm.log(0)
    assert "join_timeout" in vllm.log(0) and "rank 2" in vllm.log(0), vllm.log(0)
    assert gone(followers)


def test_a_request_larger_than_a_step_ends_alone(vllm):
    """What a rank by itself refuses ends no tensor-parallel engine, either."""
    vllm.start(0, *TP)
    vllm.add("large", prompt=[3] * (80 << 20))
    for n in range(40):
        vllm.add(f"wide{n}", prompt=[3] * (4 << 20))
    vllm.add("small", max_tokens=6)
    assert vllm.pump(100, lambda: all(vllm.finish(r) is not None for r in ("large", "wide0", "wide39", "small"))), vllm.log(0)
    assert vllm.finish("large") == vllm.finish("wide0") == 3 and len(vllm.tokens("small")) == 6 and vllm.dead == 0
