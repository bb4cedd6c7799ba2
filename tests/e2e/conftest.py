"""Fixtures: a gateway with the byte tokenizer and any number of sim or script ranks, each ended for sure."""
from __future__ import annotations

import json
import pathlib
import socket
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from rankgate_process import SLOWDOWN, Process, Server, free_port, hangup, program, sanitizer_reports, wait_for  # noqa: E402, F401

# Tokens that are lower-case letters, so that text can be compared.
LETTERS = ["--sim-vocab-size", "259", "--sim-first-token", "97", "--sim-last-token", "122", "--sim-eos-token", "257", "--max-model-len", "4096"]
SCRIPT = ["--sim-vocab-size", "259", "--sim-eos-token", "257", "--max-model-len", "4096"]


class Rank(Process):
    def __init__(self, stack: "Stack", index: int, runner: str, args: list[str]):
        self.index = index
        self.socket = stack.folder / f"r{index}.sock"
        argv = [program(), "engine", "model", "--runner", runner, "--data-parallel-size", str(stack.ranks_wanted), "--data-parallel-rank",
                str(index), "--data-parallel-rpc-port", str(stack.rpc_port), "--load-page-dir", str(stack.folder)]
        if runner == "script":
            argv += ["--script-socket", str(self.socket)]
        super().__init__(argv + args, stack.folder / f"rank{index}.log")

    def tell(self, line: dict) -> dict:
        """One instruction to a script rank."""
        wait_for("script socket", self.socket.exists, 20)
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(10)
            s.connect(str(self.socket))
            s.sendall(json.dumps(line).encode() + b"\n")
            return json.loads(s.makefile().readline())


class Stack:
    """One gateway, one group."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.processes: list[Process] = []
        self.ranks: list[Rank] = []
        self.rpc_port = free_port()
        self.ranks_wanted = 1
        self.server: Server | None = None

    def gateway(self, *args: str, ranks: int = 1, port: int | None = None, env: dict | None = None) -> Server:
        self.ranks_wanted = ranks
        self.server = Server("gateway", [":bytes:", "--served-model-name", "m", "--data-parallel-size", str(ranks),
                                         "--data-parallel-rpc-port", str(self.rpc_port), *args],
                             self.folder / f"gateway{len(self.processes)}.log", port=port, env=env)
        self.processes.append(self.server)
        return self.server

    def rank(self, index: int = 0, runner: str = "sim", args: list[str] | None = None) -> Rank:
        rank = Rank(self, index, runner, (LETTERS if runner == "sim" else SCRIPT) + (args or []))
        self.processes.append(rank)
        self.ranks.append(rank)
        return rank

    def start(self, *gateway_args: str, ranks: int = 1, runner: str = "sim", rank_args: list[str] | None = None) -> Server:
        server = self.gateway(*gateway_args, ranks=ranks)
        for index in range(ranks):
            self.rank(index, runner, rank_args)
        server.wait_ready()
        # A group serves from its first rank on; tests that count need all of them.
        wait_for("every rank live", lambda: json.loads(server.get("/health")[1])["groups"][0]["live"] == ranks, 20)
        return server

    def close(self):
        failed = []
        for process in self.processes:
            try:
                process.end()
            except AssertionError as error:
                failed.append(str(error))
        assert not failed, "\n".join(failed)


@pytest.fixture
def stack(tmp_path):
    before = sanitizer_reports()
    made = Stack(tmp_path)
    yield made
    made.close()
    after = sanitizer_reports()
    assert after == before, after
