# SPDX-License-Identifier: Apache-2.0
"""One rank of a test case, started by harness.py: `ranks.py '<spec as JSON>'`. Each case is a function of the same name."""

import ctypes
import hashlib
import json
import os
import pickle
import random
import select
import signal
import sys
import threading
import time

from rankgate import relay

SPEC = json.loads(sys.argv[1])
RANK, SIZE, ARGS = SPEC["rank"], SPEC["size"], SPEC["args"]


def say(event, **fields):
    print(json.dumps({"event": event, **fields}) + "\n", end="", flush=True)  # in one write: a forked child shares the pipe


def wait_go():
    sys.stdin.readline()


def make(**override):
    config = relay.Config(rank=RANK, size=SIZE, where=SPEC["where"], **{**SPEC["config"], **override})
    return relay.Leader(config) if RANK == 0 else relay.Follower(config)


def joined():
    end = make()
    report = end.join()
    assert report.elapsed_s >= 0 and RANK in report.rank_s or SIZE == 1
    say("joined", elapsed_s=report.elapsed_s, ranks=sorted(report.rank_s))
    return end


def tell(end, error):
    """Reports a failure, and that it is sticky everywhere."""
    again = None
    try:
        end.check()
    except relay.RelayError as second:
        again = second.code
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.missing, type(copy), str(copy)) == (error.code, error.missing, type(error), str(error))
    say(
        "error",
        code=error.code,
        origin_rank=error.origin_rank,
        phase=error.phase,
        step=error.step,
        deadline_s=error.deadline_s,
        missing=error.missing,
        text=str(error),
        again=again,
        failure=end.failure.code if end.failure else None,
        fd=bool(select.select([end.failure_fd()], [], [], 0)[0]),
        **{"class": type(error).__name__},
    )


def read_all(end, on_step):
    try:
        while True:
            on_step(end.next_step())
    except relay.Closed:
        pass


def first_request():
    with joined() as end:
        if RANK == 0:
            end.publish([b"the first request"])
            end.publish([])
            say("first")
        else:
            step = end.next_step()
            assert step.number == 1 and [bytes(f) for f in step] == [b"the first request"]
            say("first")
            assert len(end.next_step()) == 0
        end.finish(30)


def identical():
    rng = random.Random(1)
    with joined() as end:
        digest = hashlib.sha256()

        def note(number, frames):
            digest.update(b"%d %d" % (number, len(frames)))
            for frame in frames:
                digest.update(b"%d" % len(frame))
                digest.update(frame)

        if RANK == 0:
            steps = [[rng.randbytes(rng.randrange(3000)) for _ in range(rng.randrange(6))] for _ in range(200)]
            steps.insert(50, [b"f%d" % i for i in range(1500)])
            steps.insert(90, [rng.randbytes(9 << 20), b"", rng.randbytes(9 << 20)])
            steps.insert(91, [])
            for frames in steps:
                note(end.publish([memoryview(f) if i % 2 else bytearray(f) for i, f in enumerate(frames)]), frames)
        else:
            kept = []
            read_all(end, lambda step: kept.append(step) if step.number < 30 else note(step.number, list(step)))
            # Steps that were kept do not hold up rank 0, and stay as they were. Hashed late, in order: only the tail is compared.
            late = hashlib.sha256()
            for step in kept:
                late.update(b"".join(step))
            say("kept", hash=late.hexdigest())
        if RANK == 0:
            # the same split as the followers' hash
            digest = hashlib.sha256()
            for number, frames in enumerate(steps, 1):
                if number >= 30:
                    note(number, frames)
            early = hashlib.sha256()
            for frames in steps[:29]:
                early.update(b"".join(frames))
            say("kept", hash=early.hexdigest())
        say("hash", hash=digest.hexdigest())
        end.finish(30)


def scheduler_loop():
    """The loop of an engine: `blocking` is each rank's own opinion, requests come in bursts, aborts follow at once."""
    rng = random.Random(RANK)
    with joined() as end:
        log = hashlib.sha256()
        running = set()
        turn = 0
        queue = []
        feed = random.Random(99)
        left = 400
        next_id = 0
        while True:
            blocking = not running
            if RANK == 0:
                if blocking or feed.random() < 0.3:
                    for _ in range(feed.choice([1, 1, 2, 30])):
                        next_id += 1
                        queue.append(b"add %d" % next_id)
                        if feed.random() < 0.3:
                            queue.append(b"abort %d" % next_id)
                        if feed.random() < 0.1:
                            queue.append(b"garbage")
                if blocking and feed.random() < 0.1:
                    time.sleep(0.02)
                left -= 1
                if left < 0:
                    break
                frames, queue = queue, []
                end.publish(frames)
            else:
                try:
                    frames = [bytes(f) for f in end.next_step()]
                except relay.Closed:
                    break
            turn += 1
            for frame in frames:
                kind, _, name = frame.partition(b" ")
                if kind == b"add":
                    running.add(int(name))
                elif kind == b"abort":
                    running.discard(int(name))
            running = {r for r in running if (r * 7 + turn) % 5}
            log.update(repr((turn, frames, sorted(running))).encode())
            end.set_digest(int.from_bytes(log.digest()[:8], "little"))
            time.sleep(rng.random() * 0.002)
        say("hash", hash=log.hexdigest(), turns=turn)
        end.finish(30)


def busy():
    """Publishes and reads as fast as it goes until a failure ends it."""
    with make() as end:
        try:
            end.join()
            say("joined")
            while True:
                if RANK == 0:
                    end.publish([b"x" * 300])
                else:
                    end.next_step()
                if ARGS.get("pause"):
                    time.sleep(ARGS["pause"])
        except relay.RelayError as error:
            tell(end, error)


def early_finish():
    """One rank is in finish while the other still waits for work."""
    with make() as end:
        try:
            end.join()
            say("joined")
            if RANK == ARGS["rank"]:
                say("finishing")
                end.finish(30)
            poller = select.poll()
            poller.register(end.failure_fd(), select.POLLIN)
            poller.poll(30000)
            end.check()
            say("nothing")
        except relay.RelayError as error:
            tell(end, error)


def idle():
    """Rank 0 waits only for requests, in a poller of its own; the others in next_step."""
    with make() as end:
        try:
            end.join()
            if RANK == 0:
                end.publish([b"warm"])
            else:
                end.next_step()
            say("joined")
            if RANK == 0:
                poller = select.poll()
                requests, _ = os.pipe()
                poller.register(requests, select.POLLIN)
                poller.register(end.failure_fd(), select.POLLIN)
                poller.poll()
                end.check()
            else:
                end.next_step()
            say("nothing")
        except relay.RelayError as error:
            tell(end, error)


def counted():
    """A fixed number of steps with a pace, then the orderly end; tells how many arrived."""
    with joined() as end:
        total = ARGS["steps"]
        if RANK == 0:
            for i in range(total):
                end.publish([b"%d" % i])
                time.sleep(ARGS.get("pace", 0.0))
            got = total
        else:
            got = 0
            while got < total:
                step = end.next_step()
                assert step.number == got + 1 and bytes(step[0]) == b"%d" % got
                got += 1
        end.finish(30)
        say("counted", got=got)


def join_only():
    with make() as end:
        try:
            end.join()
            say("joined")
            end.finish(20)
        except relay.RelayError as error:
            tell(end, error)


def diverge():
    with joined() as end:
        try:
            while True:
                number = end.publish([b"x"]) if RANK == 0 else end.next_step().number
                end.set_digest(number * 1000 + (1 if number == 17 and RANK == ARGS["odd"] else 0))
        except relay.RelayError as error:
            tell(end, error)


def hung_loop():
    """A follower's main thread hangs in Python while its process is fine."""
    with joined() as end:
        try:
            if RANK == 0:
                end.publish([b"x"])
                select.select([end.failure_fd()], [], [], 20)
                end.check()
            else:
                end.next_step()
                if RANK == ARGS["rank"]:
                    say("hanging")
                    select.select([end.failure_fd()], [], [], 20)
                    end.check()
                end.next_step()
        except relay.RelayError as error:
            tell(end, error)


def backpressure():
    """Rank 0 is blocked in publish because one follower does not read."""
    with joined() as end:
        try:
            if RANK == 0:
                for i in range(10):
                    if i == ARGS.get("lag", 2):
                        say("blocked")
                    end.publish([b"x" * ARGS.get("bytes", 10)])
            elif RANK == ARGS["rank"]:
                wait_go()
                end.check()
                end.next_step()
            else:
                while True:
                    end.next_step()
        except relay.RelayError as error:
            tell(end, error)


def interrupt():
    """SIGINT is KeyboardInterrupt inside join, publish and next_step."""
    end = make()
    try:
        if ARGS["in"] == "join":
            say("waiting")
            end.join()
        else:
            end.join()
            if RANK == 0 and ARGS["in"] == "publish":
                say("waiting")
                while True:
                    end.publish([b"x"])
            if RANK == 1 and ARGS["in"] == "next_step":
                say("waiting")
                end.next_step()
            if RANK == 0 and ARGS["in"] == "finish":
                say("waiting")
                end.finish(30)
            wait_go()
    except KeyboardInterrupt:
        say("interrupted")
    end.close()


def join_again():
    """A handler that raises breaks off join; the same end joins again."""

    class Alarm(Exception):
        pass

    def on_alarm(*_):
        raise Alarm

    with make() as end:
        if RANK == 1:
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.7)
            try:
                end.join()
                say("joined_too_early")
            except Alarm:
                say("broken_off", failure=end.failure is not None)
        elif RANK == 2:
            wait_go()
        end.join()
        if RANK == 0:
            end.publish([b"first"])
        else:
            say("read", frame=bytes(end.next_step(20)[0]).decode())
        end.finish(20)


def exit_with_threads():
    """The main thread ends while daemon threads are inside calls and go on calling."""
    end = joined()

    def run():
        while True:
            try:
                end.publish([]) if RANK == 0 else end.next_step()
            except relay.RelayError:
                pass

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.2)
    say("leaving")


def handler_runs():
    """A signal handler that does not raise runs during the wait, and the wait goes on."""
    with joined() as end:
        if RANK == 0:
            wait_go()
            end.publish([b"x"])
        else:
            signal.signal(signal.SIGUSR1, lambda *_: say("handled"))
            say("waiting")
            assert bytes(end.next_step()[0]) == b"x"
        end.finish(20)


def forked():
    """A forked child neither hides the parent's death nor can use the parent's relay."""
    with joined() as end:
        try:
            if RANK == 1:
                child = os.fork()
                if child == 0:
                    try:
                        end.next_step(0.1)
                    except relay.Closed:
                        say("child_closed")
                    end.close()
                    os.close(1)
                    time.sleep(3)
                    os._exit(0)
                say("forked", child=child)
                wait_go()
            elif RANK == 0:
                select.select([end.failure_fd()], [], [], 20)
                end.check()
            else:
                end.next_step()
        except relay.RelayError as error:
            tell(end, error)


def callback():
    seen = []
    end = make(on_failure=seen.append)
    end.join()
    say("joined")
    if RANK == 0:
        end.fail("remote_failure", "because é")
    deadline = time.monotonic() + 10
    while not seen and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(seen) == 1 and isinstance(seen[0], relay.RemoteFailure), seen
    tell(end, seen[0])
    end.close()


def exit_after():
    """The main thread is inside something that cannot be woken."""
    end = make(exit_after_s=0.2, on_failure=(lambda error: None) if RANK == 1 else None)
    end.join()
    say("joined")
    if RANK == 0:
        wait_go()
        end.fail("remote_failure", "over")
        end.close()
    elif ARGS["gil"]:
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter to itself: even on_failure cannot run
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(60)


def guarded():
    end = make(guard_fd=0) if RANK == 1 else make()
    with end:
        end.join()
        say("joined")
        try:
            if RANK == 0:
                select.select([end.failure_fd()], [], [], 20)
                end.check()
            else:
                end.next_step()
        except relay.RelayError as error:
            tell(end, error)


def idle_cpu():
    with joined() as end:
        if RANK == 0:
            time.sleep(0.2)
            before = time.process_time()
            wait_go()
            say("cpu", seconds=time.process_time() - before)
            end.publish([b"over"])
        else:
            before = time.process_time()
            end.next_step()
            say("cpu", seconds=time.process_time() - before)
        end.finish(20)


def many_steps():
    with joined() as end:
        total = ARGS["steps"]
        if RANK == 0:
            for i in range(total):
                end.publish([b"%d" % i])
        else:
            for i in range(total):
                step = end.next_step()
                if step.number != i + 1 or bytes(step[0]) != b"%d" % i:
                    raise AssertionError((i, step))
        say("done")
        end.finish(60)


def broadcast():
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import sglang_broadcast

    first = ARGS["first"]
    ranks = list(range(first, first + SIZE))
    own = first + RANK
    sglang_broadcast.register("tp", ranks=ranks, rank=own, where=SPEC["where"], **SPEC["config"])
    log = []
    for turn in range(50):
        data = [{"rid": turn, "ids": list(range(turn))}] * (turn % 3) if RANK == 0 else None
        log.append(sglang_broadcast.broadcast_pyobj(data, own, dist_group="tp", src=first, force_cpu_device=True))
    try:
        sglang_broadcast.broadcast_pyobj([], RANK, dist_group="tp", src=0)
        refused = first == 0
    except ValueError:
        refused = True
    if first == 0:
        log = log[:50]
    assert refused
    say("hash", hash=hashlib.sha256(repr(log).encode()).hexdigest())
    sglang_broadcast.unregister("tp", 20)


def engine():
    """The engine's I/O mixin over a double of its surroundings: real PULL socket, msgpack messages."""
    import engine_double

    io = engine_double.Scheduler(RANK, SIZE, SPEC["where"], ARGS["pull"])
    say("joined")
    log = []
    try:
        while True:
            blocking = not io.running
            messages = io.receive_msg(blocking=blocking)
            io.step(messages)
            log.append([m.uid for m in messages])
            if any(m.uid == "exit" for m in messages):
                break
    except relay.RelayError as error:
        tell(io._relay, error)
        return
    say("hash", hash=hashlib.sha256(repr(log).encode()).hexdigest(), seen=sum(log, []), idle=io.idle_calls)
    io.finish_relay()


if __name__ == "__main__":
    # A shell starts its background jobs with SIGINT ignored; Python then leaves it so, and these tests are about what it does otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[SPEC["case"]]()
    say("end")
