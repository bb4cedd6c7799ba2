"""Two independent real ranks: isolation, return, freeze, and a gateway that is replaced under running engines."""
import collections
import signal
import threading
import time

import pytest
from rankgate_process import wait_for


class Load:
    """Streams in threads; records per stream how it ended."""

    def __init__(self, group, count: int, max_tokens: int = 200, **body):
        self.results: list[dict] = [{} for _ in range(count)]
        self.threads = [threading.Thread(target=self._one, args=(group, i, max_tokens, body)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _one(self, group, i, max_tokens, body):
        result = self.results[i]
        result.update(tokens=0, end=None, at=0.0)
        try:
            for event in group.gateway.stream("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7 + i % 5], "max_tokens": max_tokens,
                                                                 "temperature": 0, "ignore_eos": True, **body}, timeout=60):
                if "error" in event:
                    result["end"] = "error"
                elif event.get("choices"):
                    result["tokens"] += 1 if event["choices"][0]["text"] else 0
                    result["end"] = event["choices"][0]["finish_reason"] or result["end"]
        except OSError as error:
            result["end"] = f"broken: {error}"
        result["at"] = time.monotonic()

    def join(self, seconds: float = 120):
        for thread in self.threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in self.threads), "a stream hangs"
        return self.results

    def wait_flowing(self, streams: int, seconds: float = 60):
        wait_for(f"{streams} streams with tokens", lambda: sum(r.get("tokens", 0) > 0 for r in self.results) >= streams, seconds)


def test_a_cold_burst_spreads_over_both_ranks(dense2):
    load = Load(dense2, 8, 400)

    def spread():
        counts = [dense2.gateway.metric("rankgate_in_flight", rank=str(rank)) for rank in (0, 1)]
        # A report that is a step old may count for one request more or less.
        return counts if sum(counts) == 8 and min(counts) >= 3 else None

    wait_for("eight requests over both ranks", spread, 10, 0.01)
    assert all(r["end"] == "length" for r in load.join())
    dense2.gateway.wait_idle()


def test_a_pinned_rank_gets_the_request(dense2):
    for rank in (0, 1):
        status, reply = dense2.complete(data_parallel_rank=rank)
        assert status == 200, reply
        status, _ = dense2.gateway.post("/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 1},
                                        headers={"X-data-parallel-rank": str(rank)})
        assert status == 200
    assert dense2.complete(data_parallel_rank=2)[0] == 400


def test_sigkill_under_load_leaves_the_other_rank_alone_and_the_rank_returns(dense2):
    load = Load(dense2, 16, 250)
    load.wait_flowing(12)
    killed = time.monotonic()
    dense2.engines.signal(1, signal.SIGKILL)
    dense2.wait_state(1, "dead", 1.5)
    # No request fails once the death is known.
    for _ in range(10):
        assert dense2.complete(max_tokens=2)[0] == 200
    results = load.join()
    ends = collections.Counter(r["end"] for r in results)
    assert set(ends) <= {"length", "error"}, ends
    assert ends["length"] >= 8, ends
    victims = [r for r in results if r["end"] == "error"]
    assert all(r["tokens"] > 0 for r in victims), "a request without an emitted token is retried, not failed"
    assert all(r["at"] - killed < 1.5 for r in victims), [r["at"] - killed for r in victims]
    dense2.gateway.wait_idle()
    dense2.engines.spawn(1)
    dense2.wait_state(1, "live", 120)
    assert dense2.complete(data_parallel_rank=1)[0] == 200


def test_sigkill_while_idle_is_noticed_without_a_request(dense2):
    dense2.engines.signal(0, signal.SIGKILL)
    dense2.wait_state(0, "dead", 1.5)
    for _ in range(12):
        assert dense2.complete(max_tokens=2)[0] == 200
    assert b"dead" in dense2.gateway.get("/health")[1]
    dense2.engines.spawn(0)
    dense2.wait_state(0, "live", 120)


def test_a_frozen_rank_is_named_within_three_seconds_and_comes_back(dense2):
    dense2.engines.signal(1, signal.SIGSTOP)
    try:
        dense2.wait_state(1, "wedged", 4)
        for _ in range(6):
            assert dense2.complete(max_tokens=2)[0] == 200
    finally:
        dense2.engines.signal(1, signal.SIGCONT)
    dense2.wait_state(1, "live", 10)
    assert dense2.complete(data_parallel_rank=1)[0] == 200


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_gateway_finds_its_engines_again(dense2, sig):
    exits = dense2.engines.process.text().count("exit ")
    dense2.restart_gateway(sig)
    dense2.gateway.wait_ready(20)
    for rank in (0, 1):
        assert dense2.complete(data_parallel_rank=rank)[0] == 200
    assert dense2.engines.process.text().count("exit ") == exits, "an engine was restarted"
