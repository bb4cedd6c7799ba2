# SPDX-License-Identifier: Apache-2.0
"""Runs each rank of a case as its own process (ranks.py) and collects what they report. Processes are only ever killed by their pid."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))


class Rank:
    """One rank's process. Its stdout is JSON lines (events); a line on its stdin lets it go on."""

    def __init__(self, case: str, rank: int, size: int, where: str, config: Dict[str, Any], args: Dict[str, Any]):
        spec = {"case": case, "rank": rank, "size": size, "where": where, "config": config, "args": args}
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "ranks.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.events: List[Dict[str, Any]] = []
        self._queue: "queue.Queue[Optional[Dict[str, Any]]]" = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait_event(self, name: str, timeout: float = 30.0) -> Dict[str, Any]:
        deadline = time.monotonic() + timeout
        for event in self.events:
            if event["event"] == name:
                return event
        while True:
            try:
                event = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"rank {self.rank}: no {name} within {timeout} s; had {self.events}") from None
            if event is None:
                raise AssertionError(f"rank {self.rank} ended (status {self.process.wait()}) without {name}; had {self.events}")
            event["at"] = time.monotonic()
            self.events.append(event)
            if event["event"] == name:
                return event

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait_stopped(self) -> None:
        while True:
            with open(f"/proc/{self.process.pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "T":
                    return
            time.sleep(0.001)

    def end(self, timeout: float = 15.0) -> int:
        """The rank ends by itself; its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {self.rank} does not end; had {self.events}") from None


class Group:
    """All ranks of a case; the context manager demands that they end by themselves and leave nothing behind."""

    def __init__(self, tmp_path, case: str, size: int, backend: str = "ring", args=None, only=None, delays=None, **config):
        self.folder = tmp_path / "meet"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.where = str(self.folder / "relay")
        if backend == "tcp":
            self.where = f"tcp://127.0.0.1:{free_port()}"
        config.setdefault("epoch", 77)
        config.setdefault("join_s", 20.0)
        self.config = {"backend": backend, **config}
        self.case, self.size, self.args = case, size, args or {}
        self.ranks: Dict[int, Rank] = {}
        order = list(only if only is not None else range(size))
        for rank in order:
            if delays:
                time.sleep(delays.get(rank, 0.0))
            self.start(rank)

    def start(self, rank: int, **override) -> Rank:
        self.ranks[rank] = Rank(self.case, rank, self.size, self.where, {**self.config, **override}, self.args)
        return self.ranks[rank]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                for rank in self.ranks.values():
                    rank.end()
                assert os.listdir(self.folder) == [], "the rendezvous folder is not empty"
        finally:
            for rank in self.ranks.values():
                if rank.process.poll() is None:
                    rank.signal(signal.SIGCONT)
                    rank.process.kill()
                    rank.process.wait()
                rank.process.stdin.close()

    def all(self, name: str, timeout: float = 30.0, but=()) -> Dict[int, Dict[str, Any]]:
        return {r: rank.wait_event(name, timeout) for r, rank in self.ranks.items() if r not in but}

    def one_cause(self, code, origin, but=(), timeout: float = 30.0) -> Dict[int, Dict[str, Any]]:
        """Every rank (but these) has raised the same failure, more than once, and its failure_fd says so."""
        errors = self.all("error", timeout, but)
        codes = (code,) if isinstance(code, str) else code
        for rank, event in errors.items():
            assert event["code"] in codes, (rank, event)
            assert event["origin_rank"] == origin, (rank, event)
            assert event["again"] == event["code"] and event["failure"] == event["code"] and event["fd"], (rank, event)
            assert event["class"] == "".join(part.title() for part in event["code"].split("_")), (rank, event)
        assert len({event["code"] for event in errors.values()}) == 1, errors
        return errors


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Burners:
    """One busy process per core."""

    def __enter__(self):
        self.processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
