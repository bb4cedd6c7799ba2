"""Two real ranks in lockstep (the DP engine class with waves): the known hangs must not happen, and a death is told at once."""
import random
import signal
import threading
import time

import pytest


def test_the_group_is_recognised_as_lockstep(lock2):
    assert b"lockstep" in lock2.gateway.get("/health")[1]


def test_serial_requests_wake_a_parked_group_each_time(lock2):
    for i in range(12):
        status, reply = lock2.complete(timeout=30, data_parallel_rank=i % 2)
        assert status == 200, reply
        # Long enough for the wave to end, so that the next request meets a parked group.
        time.sleep(0.25)
    lock2.gateway.wait_idle()


def _random_requests(lock2, count, seconds):
    lost = []

    def one(i):
        try:
            status, reply = lock2.complete(timeout=60, max_tokens=random.randint(1, 12), prompt=[5, 6, i % 100 + 7])
            if status != 200:
                lost.append((i, status, reply))
        except OSError as error:
            lost.append((i, str(error)))

    random.seed(1)
    threads = []
    for i in range(count):
        thread = threading.Thread(target=one, args=(i,))
        thread.start()
        threads.append(thread)
        time.sleep(random.expovariate(count / seconds))
    for thread in threads:
        thread.join(90)
    assert not any(t.is_alive() for t in threads), "requests hang"
    assert not lost, lost[:3]
    lock2.gateway.wait_idle()


def test_requests_at_random_times_none_lost(lock2):
    _random_requests(lock2, 100, 15)


@pytest.mark.slow
def test_three_hundred_requests_at_random_times_none_lost(lock2):
    _random_requests(lock2, 300, 60)


def test_pause_and_resume_reach_all_ranks(lock2):
    for _ in range(3):
        assert lock2.gateway.post("/pause", {}, timeout=20)[0] == 200
        assert lock2.gateway.post("/resume", {}, timeout=20)[0] == 200
    assert lock2.complete(timeout=30)[0] == 200


def test_resume_without_a_pause_does_not_block_the_group(lock2):
    assert lock2.gateway.post("/resume", {}, timeout=20)[0] == 200
    assert lock2.complete(timeout=30)[0] == 200


def test_a_restarted_gateway_outranks_the_waves_of_the_old_one(lock2):
    for _ in range(3):
        assert lock2.complete(timeout=30)[0] == 200
    lock2.restart_gateway(signal.SIGKILL)
    lock2.gateway.wait_ready(20)
    for i in range(6):
        assert lock2.complete(timeout=30, data_parallel_rank=i % 2)[0] == 200


@pytest.mark.slow
def test_a_dead_rank_fails_the_group_at_once_with_the_reason(lock2):
    results = []
    threads = [threading.Thread(target=lambda: results.append(lock2.complete(timeout=60, max_tokens=300, ignore_eos=True))) for _ in range(6)]
    for t in threads:
        t.start()
    time.sleep(1.0)
    killed = time.monotonic()
    lock2.engines.signal(1, signal.SIGKILL)
    for t in threads:
        t.join(30)
    assert not any(t.is_alive() for t in threads), "hangs on a dead lockstep group"
    assert time.monotonic() - killed < 5
    assert all(status >= 500 for status, _ in results), results
    assert lock2.gateway.get("/health")[0] == 503
    status, reply = lock2.complete(timeout=10)
    assert status == 503, reply
    # Both ranks start again: the group serves again.
    lock2.engines.stop()
    lock2.engines = type(lock2.engines)(lock2.model, lock2.rpc_port, 2, lock2.tag).wait_imported()
    for rank in (0, 1):
        lock2.engines.spawn(rank)
    lock2.gateway.wait_ready(300)
    assert lock2.complete(timeout=60)[0] == 200
