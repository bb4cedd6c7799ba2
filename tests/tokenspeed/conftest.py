"""The real TokenSpeed event loop (published package, scripted tokens, CPU) behind the built gateway. Run with build/venv-tokenspeed's Python."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from rankgate_process import ROOT, Process, Server, free_port, shared, wait_for  # noqa: E402

VENV = ROOT / "build" / "venv-tokenspeed"
WORK = ROOT / "build" / "lane-tokenspeed"
START_S = 180


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="leave out what is marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only in the full lane")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--short"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def engine_env() -> dict:
    return {"PYTHONPATH": f"{VENV / 'ts'}:{shared() / 'tools/tokenspeed_live'}", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1"}


def model_dir() -> pathlib.Path:
    path = WORK / "model"
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run([VENV / "bin/python", shared() / "tools/tokenspeed_live/make_model.py", path], check=True)
    return path


class Group:
    """A gateway and live_engine.py processes that play its ranks. Nobody declares the runtime unless a test does."""

    def __init__(self, ranks: int, tag: str, runtime: str | None = None, delay: float = 0.0):
        self.tag, self.ranks, self.delay = tag, ranks, delay
        self.rpc_port = free_port()
        WORK.mkdir(parents=True, exist_ok=True)
        self.log = WORK / f"{tag}.gateway.log"
        self.log.write_text("")
        self.sockets = tempfile.TemporaryDirectory(prefix="rgts")
        self.args = [str(model_dir()), "--served-model-name", "tiny", *(["--runtime", runtime] if runtime else []), "--data-parallel-size", str(ranks),
                     "--data-parallel-rpc-port", str(self.rpc_port), "--socket-dir", self.sockets.name + "/s"]
        self.gateway = Server("gateway", self.args, self.log)
        self.engines: dict[int, Process] = {}

    def restart_gateway(self, sig: int):
        self.gateway.stop(sig)
        self.gateway = Server("gateway", self.args, self.log, port=self.gateway.port)
        self.gateway.wait_ready(30)

    def answers(self) -> bool:
        try:
            return self.gateway.get("/liveness")[0] == 200
        except OSError:
            return False

    def health(self) -> dict:
        return json.loads(self.gateway.get("/health")[1])["groups"][0]

    def spawn(self, rank: int):
        log = WORK / f"{self.tag}.rank{rank}.log"
        log.write_text("")
        argv = [str(VENV / "bin/python"), str(shared() / "tools/tokenspeed_live/live_engine.py"), "--rpc-port", str(self.rpc_port), "--model",
                str(model_dir()), "--engine-index", str(rank), "--port", str(free_port()), "--enable-output-logprobs"]
        if self.delay:
            argv += ["--delay", str(self.delay)]
        self.engines[rank] = Process(argv, log, engine_env())

    def start(self):
        for rank in range(self.ranks):
            self.spawn(rank)
        self.gateway.wait_ready(START_S)
        return self

    def stop(self):
        self.gateway.stop()
        for engine in self.engines.values():
            engine.stop(signal.SIGKILL)
        self.sockets.cleanup()

    def complete(self, timeout: float = 60, **body):
        return self.gateway.post("/v1/completions", {"model": "tiny", "prompt": [65], "max_tokens": 5, "temperature": 0, **body}, timeout)

    def state(self, rank: int) -> str:
        for line in self.gateway.get("/metrics")[1].decode().splitlines():
            if line.startswith("rankgate_rank_state{") and f'rank="{rank}"' in line and line.endswith(" 1"):
                return re.search(r'state="([a-z]+)"', line).group(1)
        return "?"

    def wait_state(self, rank: int, state: str, seconds: float):
        wait_for(f"rank {rank} {state}", lambda: self.state(rank) == state, seconds, 0.02)


@pytest.fixture(scope="session")
def one():
    group = Group(1, "one")
    try:
        yield group.start()
    finally:
        group.stop()


@pytest.fixture(scope="session")
def two():
    group = Group(2, "two", delay=0.01)
    try:
        yield group.start()
    finally:
        group.stop()
