# SPDX-License-Identifier: Apache-2.0
"""What the relay demands of itself, from real processes: SIGKILL and SIGSTOP included. The case names follow docs/relay.md."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref

import pytest

from harness import Burners, Group, free_port

from rankgate import relay

BACKENDS = ("ring", "stream", "tcp")
both = pytest.mark.parametrize("backend", BACKENDS)


@both
@pytest.mark.parametrize("size", (2, 4, 8))
def test_first_request_under_load(tmp_path, backend, size):
    """A step published the moment join returns reaches every rank, whatever the order of starts."""
    rng = random.Random(size)
    with Burners():
        for _ in range(2 if size < 8 else 1):
            order = list(range(size))
            rng.shuffle(order)
            with Group(tmp_path, "first_request", size, backend, only=order) as group:
                group.all("first", 60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cold_starts(tmp_path, backend, long_form):
    """Random delays between the ranks; the first request is out the moment the last one is in."""
    rng = random.Random(7)
    for i in range(170 if long_form else 2):
        size = rng.choice((2, 4, 8))
        delays = {r: rng.random() * (2.0 if long_form else 0.3) / size for r in range(size)}
        order = list(range(size))
        rng.shuffle(order)
        with Group(tmp_path, "first_request", size, backend, only=order, delays=delays) as group:
            group.all("first", 60)


@both
def test_steps_identical(tmp_path, backend):
    with Group(tmp_path, "identical", 4, backend) as group:
        for event in ("kept", "hash"):
            hashes = {r: e["hash"] for r, e in group.all(event, 60).items()}
            assert len(set(hashes.values())) == 1, hashes


def test_scheduler_loop(tmp_path):
    """L03: every rank sees the same list in the same step, with aborts right behind their adds and garbage between them."""
    with Group(tmp_path, "scheduler_loop", 4, digest=True) as group:
        events = group.all("hash", 60)
        assert len({(e["hash"], e["turns"]) for e in events.values()}) == 1, events


@both
@pytest.mark.parametrize("case", ("busy", "idle"))
@pytest.mark.parametrize("victim", (0, 2))
def test_kill(tmp_path, backend, case, victim):
    """L01: every survivor raises, naming the victim, within 1 s."""
    with Group(tmp_path, case, 4, backend) as group:
        group.all("joined")
        time.sleep(0.1)
        at = time.monotonic()
        group.ranks[victim].signal(signal.SIGKILL)
        errors = group.one_cause("leader_died" if victim == 0 else "peer_died", victim, but=(victim,))
        assert max(e["at"] for e in errors.values()) - at < 1.0


@both
@pytest.mark.parametrize("case", ("busy", "idle"))
@pytest.mark.parametrize("victim", (0, 2))
def test_stop(tmp_path, backend, case, victim):
    """A stopped rank is found within its budget + 1 s, one cause on all; awake again, it raises the same."""
    with Group(tmp_path, case, 4, backend, stall_after_s=1.0, publish_stall_s=1.0) as group:
        group.all("joined")
        time.sleep(0.1)
        at = time.monotonic()
        group.ranks[victim].signal(signal.SIGSTOP)
        errors = group.one_cause(("peer_stalled", "publish_stalled"), victim, but=(victim,))
        took = max(e["at"] for e in errors.values()) - at
        assert 0.5 < took < 2.0, took
        assert all(e["deadline_s"] == 1.0 for e in errors.values())
        group.ranks[victim].signal(signal.SIGCONT)
        group.one_cause({next(iter(errors.values()))["code"]}, victim)


def test_stop_found_by_publish_alone(tmp_path):
    with Group(tmp_path, "busy", 4, publish_stall_s=1.0) as group:
        group.all("joined")
        at = time.monotonic()
        group.ranks[3].signal(signal.SIGSTOP)
        errors = group.one_cause("publish_stalled", 3, but=(3,))
        assert 0.9 < max(e["at"] for e in errors.values()) - at < 2.0
        assert errors[0]["step"] is not None
        group.ranks[3].signal(signal.SIGCONT)
        group.one_cause("publish_stalled", 3)


@both
def test_short_stop(tmp_path, backend):
    """1.5 s of standstill inside a 5 s budget lose nothing."""
    args = {"steps": 400, "pace": 0.002}
    with Group(tmp_path, "counted", 4, backend, args=args, stall_after_s=5.0, publish_stall_s=5.0) as group:
        group.all("joined")
        time.sleep(0.1)
        for victim in (2, 0):
            group.ranks[victim].signal(signal.SIGSTOP)
            time.sleep(1.5 if victim == 2 else 0.5)
            group.ranks[victim].signal(signal.SIGCONT)
        assert {e["got"] for e in group.all("counted").values()} == {400}


@both
def test_freeze_all(tmp_path, backend):
    """A machine that stood still for 3 s blames nobody, with budgets of 1 s."""
    args = {"steps": 300, "pace": 0.005}
    with Group(tmp_path, "counted", 4, backend, args=args, stall_after_s=1.0, publish_stall_s=1.0) as group:
        group.all("joined")
        time.sleep(0.2)
        for rank in group.ranks.values():
            rank.signal(signal.SIGSTOP)
        for rank in group.ranks.values():
            rank.wait_stopped()
        time.sleep(3.0)
        for rank in group.ranks.values():
            rank.signal(signal.SIGCONT)
        assert {e["got"] for e in group.all("counted").values()} == {300}


@both
def test_missing_rank(tmp_path, backend):
    with Group(tmp_path, "join_only", 4, backend, only=(0, 1, 3), join_s=1.5) as group:
        errors = group.one_cause("join_timeout", 2)
        assert all(e["missing"] == [2] and e["deadline_s"] == 1.5 for e in errors.values())


@both
def test_missing_leader(tmp_path, backend):
    with Group(tmp_path, "join_only", 3, backend, only=(1, 2), join_s=0.8) as group:
        errors = group.one_cause("join_timeout", 0)
        assert all(e["missing"] == [0] for e in errors.values())


@both
def test_wrong_epoch(tmp_path, backend):
    with Group(tmp_path, "join_only", 3, backend, only=(0, 1), join_s=2.0) as group:
        group.start(2, epoch=78)
        stranger = group.ranks[2].wait_event("error")
        assert stranger["code"] == "bad_epoch" and stranger["class"] == "BadEpoch"
        errors = group.one_cause("join_timeout", 2, but=(2,))
        assert all(e["missing"] == [2] for e in errors.values())


@both
@pytest.mark.parametrize("victim", (0, 1))
def test_kill_during_join(tmp_path, backend, victim):
    """Rank 2 never comes; a rank is killed meanwhile. Nobody hangs, everybody is told, nothing is left behind."""
    with Group(tmp_path, "join_only", 4, backend, only=(0, 1, 3), join_s=2.0) as group:
        time.sleep(0.8)
        group.ranks[victim].signal(signal.SIGKILL)
        errors = group.all("error", 10, but=(victim,))
        if victim == 0:
            assert {e["code"] for e in errors.values()} <= {"leader_died", "join_timeout"}
        else:
            assert all(e["code"] == "join_timeout" and set(e["missing"]) == {1, 2} for e in errors.values()), errors


def test_killed_follower_may_come_back_before_go(tmp_path):
    with Group(tmp_path, "first_request", 3, only=(0, 1)) as group:
        time.sleep(0.8)
        group.ranks[1].signal(signal.SIGKILL)
        group.ranks[1].end()
        group.start(1)
        group.start(2)
        group.all("first")


def test_stale_socket_of_a_killed_leader_is_taken_over(tmp_path):
    with Group(tmp_path, "first_request", 2, only=(0,)) as group:
        while not os.path.exists(group.where):
            time.sleep(0.01)
        group.ranks[0].signal(signal.SIGKILL)
        group.ranks[0].end()
        assert os.path.exists(group.where)
        group.start(0)
        group.start(1)
        group.all("first")


def test_second_leader_is_refused_and_the_group_is_not_disturbed(tmp_path):
    with Group(tmp_path, "first_request", 2, only=(0,)) as group:
        while not os.path.exists(group.where):
            time.sleep(0.01)
        second = relay.Leader(relay.Config(rank=0, size=2, where=group.where, epoch=1))
        with pytest.raises(relay.DuplicateRank):
            second.join()
        second.close()
        group.start(1)
        group.all("first")


@both
@pytest.mark.parametrize("odd", (2, 3))
def test_divergence(tmp_path, backend, odd):
    with Group(tmp_path, "diverge", 4, backend, args={"odd": odd}, digest=True) as group:
        errors = group.one_cause("diverged", odd)
        assert all(e["step"] == 17 and e["phase"] == "digest" for e in errors.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hung_loop_is_found_though_its_process_is_fine(tmp_path, backend):
    with Group(tmp_path, "hung_loop", 3, backend, args={"rank": 2}, stall_after_s=0.6) as group:
        group.one_cause("peer_stalled", 2)


@both
@pytest.mark.parametrize("victim", (0, 1, 2))
def test_kill_while_blocked_in_back_pressure(tmp_path, backend, victim):
    """Rank 0 waits for room because rank 2 does not read; somebody dies."""
    args = {"rank": 2, "bytes": 3 << 20, "lag": 0} if backend == "ring" else {"rank": 2}
    with Group(tmp_path, "backpressure", 3, backend, args=args) as group:
        group.ranks[0].wait_event("blocked")
        time.sleep(0.2)
        group.ranks[victim].signal(signal.SIGKILL)
        if victim != 2:
            time.sleep(0.3)
            group.ranks[2].go()
        errors = group.one_cause("leader_died" if victim == 0 else "peer_died", victim, but=(victim,))
        assert len(errors) == 2


@both
@pytest.mark.parametrize("victim", (0, 1))
def test_kill_while_waiting_in_finish(tmp_path, backend, victim):
    """The victim is in finish, its peer still works: that is a death. With 2 ranks a follower is the last that finish waits for."""
    with Group(tmp_path, "early_finish", 2, backend, args={"rank": victim}) as group:
        group.ranks[victim].wait_event("finishing")
        group.ranks[1 - victim].wait_event("joined")
        time.sleep(0.2)
        group.ranks[victim].signal(signal.SIGKILL)
        group.one_cause("leader_died" if victim == 0 else "peer_died", victim, but=(victim,))


@both
@pytest.mark.parametrize("place,rank", (("join", 0), ("join", 1), ("publish", 0), ("next_step", 1), ("finish", 0)))
def test_sigint_is_keyboard_interrupt(tmp_path, backend, place, rank):
    only = (rank,) if place == "join" else (0, 1)
    with Group(tmp_path, "interrupt", 2, backend, args={"in": place}, only=only) as group:
        group.ranks[rank].wait_event("waiting")
        time.sleep(0.15)
        group.ranks[rank].signal(signal.SIGINT)
        group.ranks[rank].wait_event("interrupted", 5)
        for other, process in group.ranks.items():
            if other != rank:
                process.go()


@both
def test_join_broken_off_by_a_handler_can_be_called_again(tmp_path, backend):
    with Group(tmp_path, "join_again", 3, backend) as group:
        assert not group.ranks[1].wait_event("broken_off")["failure"]
        group.ranks[2].go()
        for rank in (1, 2):
            assert group.ranks[rank].wait_event("read")["frame"] == "first"


@both
def test_the_interpreter_ends_quietly_while_threads_are_inside_calls(tmp_path, backend):
    for _ in range(3):
        with Group(tmp_path, "exit_with_threads", 3, backend) as group:
            assert [rank.end() for rank in group.ranks.values()] == [0, 0, 0]


def test_a_cycle_through_on_failure_is_collected():
    class Engine:
        def lost(self, error):
            pass

    def make():
        engine = Engine()
        engine.end = relay.Leader(relay.Config(rank=0, size=2, where="/tmp/never", epoch=1, on_failure=engine.lost))
        return weakref.ref(engine)

    gone = make()
    gc.collect()
    assert gone() is None


def test_a_signal_handler_runs_during_the_wait(tmp_path):
    with Group(tmp_path, "handler_runs", 2) as group:
        group.ranks[1].wait_event("waiting")
        time.sleep(0.1)
        group.ranks[1].signal(signal.SIGUSR1)
        group.ranks[1].wait_event("handled", 5)
        group.ranks[0].go()
        group.all("end")


@both
def test_a_forked_child_hides_no_death(tmp_path, backend):
    with Group(tmp_path, "forked", 3, backend) as group:
        group.ranks[1].wait_event("forked")
        group.ranks[1].wait_event("child_closed")
        at = time.monotonic()
        group.ranks[1].signal(signal.SIGKILL)
        errors = group.one_cause("peer_died", 1, but=(1,))
        assert max(e["at"] for e in errors.values()) - at < 1.0


def test_on_failure_is_called_once(tmp_path):
    with Group(tmp_path, "callback", 2) as group:
        events = group.one_cause("remote_failure", 0)
        assert all("because é" in e["text"] for e in events.values())


@pytest.mark.parametrize("gil", (False, True))
def test_exit_after_ends_a_rank_that_cannot_be_woken(tmp_path, gil):
    with Group(tmp_path, "exit_after", 2, args={"gil": gil}) as group:
        group.all("joined")
        group.ranks[0].go()
        assert group.ranks[1].end() == 70


def test_guard_fd_ends_the_group_when_the_launcher_is_gone(tmp_path):
    with Group(tmp_path, "guarded", 3) as group:
        group.all("joined")
        group.ranks[1].process.stdin.close()
        group.one_cause("remote_failure", 1)


def test_idle_costs_no_cpu(tmp_path):
    with Group(tmp_path, "idle_cpu", 3) as group:
        group.all("joined")
        time.sleep(3.0)
        group.ranks[0].go()
        for rank, event in group.all("cpu").items():
            assert event["seconds"] < 0.03, (rank, event)


@both
def test_many_steps(tmp_path, backend):
    """4 processes, 10^5 steps through the wheel (fewer on the portable back-ends)."""
    steps = 100_000 if backend == "ring" else 10_000
    with Group(tmp_path, "many_steps", 4, backend, args={"steps": steps}, max_lag_steps=64) as group:
        group.all("done", 120)


@pytest.mark.parametrize("first", (0, 4))
def test_sglang_broadcast(tmp_path, first):
    """L04: group-local ranks under global numbering; wrong numbering is refused, not a hang."""
    with Group(tmp_path, "broadcast", 4, args={"first": first}) as group:
        hashes = {e["hash"] for e in group.all("hash").values()}
        assert len(hashes) == 1


def test_two_groups_side_by_side(tmp_path):
    """L04: DP = 2 x TP = 2 on one host; each group's requests reach exactly its ranks."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Group(tmp_path / "a", "broadcast", 2, args={"first": 0}) as a, Group(tmp_path / "b", "broadcast", 2, args={"first": 2}) as b:
        for group in (a, b):
            assert len({e["hash"] for e in group.all("hash").values()}) == 1


def engine_sender(tmp_path):
    msgpack = pytest.importorskip("msgpack")
    zmq = pytest.importorskip("zmq")
    address = f"ipc://{tmp_path}/pull"
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    return address, lambda kind, uid: socket.send(msgpack.packb({"kind": kind, "uid": uid, "ids": b"\0" * 64})), socket


@pytest.mark.parametrize("size", (2, 4))
def test_engine_mixin(tmp_path, size):
    """The engine's own I/O mixin over a real PULL socket; the first request waits there before anybody is ready."""
    address, send, socket = engine_sender(tmp_path)
    send("user", "first")
    with Group(tmp_path, "engine", size, args={"pull": address}) as group:
        group.all("joined")
        rng = random.Random(3)
        expected = ["first"]
        for i in range(200):
            send("user", f"u{i}")
            expected.append(f"u{i}")
            if rng.random() < 0.3:
                send("abort", f"u{i}")
                expected.append(f"u{i}")
            if rng.random() < 0.1:
                time.sleep(0.01)
        send("user", "exit")
        events = group.all("hash")
        assert len({e["hash"] for e in events.values()}) == 1
        assert events[0]["seen"] == expected + ["exit"]
        assert all(e["idle"] > 0 for e in events.values())
    socket.close(0)


def test_engine_mixin_kill(tmp_path):
    address, send, socket = engine_sender(tmp_path)
    with Group(tmp_path, "engine", 4, args={"pull": address}) as group:
        group.all("joined")
        send("user", "one")
        time.sleep(0.3)
        group.ranks[3].signal(signal.SIGKILL)
        at = time.monotonic()
        errors = group.one_cause("peer_died", 3, but=(3,))
        assert max(e["at"] for e in errors.values()) - at < 1.0
    socket.close(0)


def test_engine_mixin_is_the_original_offline_and_alone(tmp_path):
    import engine_double

    offline = engine_double.Scheduler(1, 4, str(tmp_path / "relay"), None, offline=True)
    assert offline.receive_msg == offline.offline_receive_msg and not hasattr(offline, "_relay")
    address, send, socket = engine_sender(tmp_path)
    alone = engine_double.Scheduler(0, 1, str(tmp_path / "relay"), address)
    send("user", "only")
    assert [message.uid for message in alone.receive_msg(blocking=True)] == ["only"]
    assert not hasattr(alone, "_relay") and alone.tp_cpu_group == "group"
    alone._recv_from_tokenizer.context.destroy(0)
    socket.close(0)


def test_examples_are_short():
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name)) as file:
                assert len(file.readlines()) <= 60, name


def test_ranks_do_not_outlive_their_launcher(tmp_path):
    """parent_death_signal: SIGKILL of the launcher ends its ranks."""
    where = str(tmp_path / "relay")
    code = f"""
import os, subprocess, sys, time
rank = '''
import os, sys, time
from rankgate import relay
config = relay.Config(rank=int(sys.argv[1]), size=2, where={where!r}, epoch=1, parent_death_signal=9)
end = relay.Leader(config) if config.rank == 0 else relay.Follower(config)
end.join()
os.write(1, (str(os.getpid()) + chr(10)).encode())  # one write: two ranks share the pipe
time.sleep(60)
'''
ranks = [subprocess.Popen([sys.executable, "-c", rank, str(r)]) for r in (0, 1)]
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)
    launcher.stdout.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- one process ---


def test_single_rank(tmp_path):
    where = tmp_path / "relay"
    with relay.Leader(relay.Config(rank=0, size=1, where=str(where), epoch=1)) as leader:
        report = leader.join()
        assert report.elapsed_s < 0.5
        assert leader.publish([b"a", b"b"]) == 1
        assert leader.publish([]) == 2
        for value in (5, -1, 2**64 - 1, type("Index", (), {"__index__": lambda self: 5})()):
            leader.set_digest(value)
        with pytest.raises(TypeError):
            leader.set_digest(5.0)
        leader.check()
        assert leader.failure is None
        assert leader.failure_fd() >= 0
        leader.finish()
    assert not where.exists()


@pytest.mark.parametrize(
    "field,value",
    [
        ("rank", 2), ("rank", -1), ("rank", "x"), ("rank", 1.0), ("size", 0), ("size", 65), ("where", ""), ("where", None),
        ("where", "/tmp/"), ("where", "a\0b"), ("where", "/" + "x" * 5000), ("epoch", -1), ("epoch", 2**64), ("epoch", None),
        ("join_s", 0), ("join_s", "soon"), ("join_s", float("nan")), ("publish_stall_s", -1), ("stall_after_s", -1),
        ("beat_s", 0), ("max_lag_steps", 0), ("max_frame", 0), ("max_frame", 2**40), ("backend", "zmq"), ("on_failure", 5),
        ("spin_us", -2), ("spin_us", 1001),
    ],
)  # fmt: skip
def test_bad_config_names_the_field(field, value):
    good = dict(rank=0, size=2, where="/tmp/x", epoch=1)
    with pytest.raises(ValueError, match=f"^{field}: "):
        relay.Config(**{**good, field: value})


def test_roles(tmp_path):
    config = relay.Config(rank=1, size=2, where=str(tmp_path / "r"), epoch=1)
    with pytest.raises(ValueError, match="^rank: "):
        relay.Leader(config)
    with pytest.raises(ValueError, match="^rank: "):
        relay.Follower(relay.Config(rank=0, size=2, where=str(tmp_path / "r"), epoch=1))
    assert relay.Config(0, 1, "x", 2**64 - 1).epoch == 2**64 - 1
    assert relay.Config(rank=0, size=2, where=tmp_path / "r", epoch=1).where == str(tmp_path / "r")


def test_calls_before_join_and_after_close(tmp_path):
    leader = relay.Leader(relay.Config(rank=0, size=2, where=str(tmp_path / "r"), epoch=1))
    with pytest.raises(relay.Closed):
        leader.publish([])
    leader.check()
    leader.close()
    leader.close()
    with pytest.raises(relay.Closed):
        leader.join()
    with pytest.raises(relay.RelayError) as caught:
        leader.publish([])
    assert caught.value.code == "closed"


def test_frames_must_be_buffers(tmp_path):
    with relay.Leader(relay.Config(rank=0, size=1, where="x", epoch=1)) as leader:
        leader.join()
        for bad in (b"bytes", ["text"], [1], 5, None):
            with pytest.raises(TypeError):
                leader.publish(bad)
        assert leader.publish((b"x", bytearray(b"y"), memoryview(b"z"))) == 1
        with pytest.raises(relay.TooLarge) as caught:
            leader.publish([b"x" * ((64 << 20) + 1)])
        assert caught.value.code == "too_large"
        assert leader.failure is None
        assert leader.publish([]) == 2


def test_long_rendezvous_paths(tmp_path):
    folder = tmp_path
    while len(str(folder)) < 300:
        folder = folder / ("d" * 50)
    folder.mkdir(parents=True)
    with Group(folder, "first_request", 2) as group:
        group.all("first")


def test_views_outlive_the_follower(tmp_path):
    import threading

    config = dict(size=2, where=str(tmp_path / "r"), epoch=1)
    follower = relay.Follower(relay.Config(rank=1, **config))
    kept = []
    read_enough = threading.Event()

    def read():
        follower.join()
        step = follower.next_step()
        kept.extend([step[0], step[-1], step[1:2][0]])
        assert len(step) == 2 and step.number == 1
        with pytest.raises(IndexError):
            step[2]
        with pytest.raises(TimeoutError):
            follower.next_step(0.01)
        assert follower.try_next_step() is None
        read_enough.set()
        follower.finish()

    thread = threading.Thread(target=read)
    thread.start()
    with relay.Leader(relay.Config(rank=0, **config)) as leader:
        leader.join()
        leader.publish([b"first", b"second"])
        assert read_enough.wait(10)
        leader.finish()
    thread.join()
    follower.close()
    del follower
    assert [bytes(k) for k in kept] == [b"first", b"second", b"second"]
    assert all(k.readonly for k in kept)
    with pytest.raises(TypeError):
        kept[0][0] = 1


def test_no_descriptor_is_left(tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for i in range(5):
        leader = relay.Leader(relay.Config(rank=0, size=2, where=str(tmp_path / "r"), epoch=1, join_s=0.02))
        with pytest.raises(relay.JoinTimeout) as caught:
            leader.join()
        assert caught.value.missing == [1]
        leader.close()
        del leader, caught
    assert count() == before
    assert os.listdir(tmp_path) == []


def test_everything_is_documented():
    for cls in (relay.Leader, relay.Follower, relay.Step, relay.JoinReport, relay.Config):
        assert cls.__doc__
        for name in dir(cls):
            if not name.startswith("_") and callable(getattr(cls, name)):
                assert getattr(cls, name).__doc__, (cls, name)
    for cls, name, signature in (
        (relay.Leader, "__init__", "(self, config: Config) -> None"),
        (relay.Leader, "join", "(self) -> JoinReport"),
        (relay.Leader, "publish", "(self, frames: Sequence[Buffer]) -> int"),
        (relay.Leader, "set_digest", "(self, value: int) -> None"),
        (relay.Leader, "finish", "(self, timeout_s: float = 5.0) -> None"),
        (relay.Follower, "next_step", "(self, timeout_s: float | None = None) -> Step"),
        (relay.Follower, "try_next_step", "(self) -> Step | None"),
        (relay.Follower, "fail", "(self, code: str, text: str = '') -> None"),
    ):
        assert getattr(cls, name).__doc__.startswith(name + signature), getattr(cls, name).__doc__
    assert sys.modules["rankgate.relay"].__doc__
    assert {c for c in relay.errors.CODES} == set(
        "join_timeout peer_died leader_died peer_stalled publish_stalled sequence_gap bad_epoch foreign_frame corrupt too_large "
        "version_mismatch duplicate_rank diverged remote_failure closed".split()
    )
    assert free_port() > 0
