"""Real vLLM engines on CPU with dummy weights (tiny model), behind the built gateway. Run with build/venv-vllm's Python."""
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from rankgate_process import ROOT, Process, Server, free_port, shared, wait_for  # noqa: E402

VLLM = ROOT / "build" / "venv-vllm" / "bin"
WORK = ROOT / "build" / "lane-vllm"
ENGINE_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
              "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
ENGINE_FLAGS = ["--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8",
                "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", "134217728", "--distributed-executor-backend", "uni"]
# A cold start of vLLM is minutes on a busy machine; nothing here is judged by it.
START_S = 600


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="leave out what is marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only in the full lane")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--short"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)


def tiny_model(kind: str) -> pathlib.Path:
    path = WORK / "models" / kind
    if not (path / "config.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--lockstep"] if kind == "lock" else []
        subprocess.run([VLLM / "python", shared() / "tools/vllm_live/make_tiny_model.py", path, *flags], check=True)
    return path


class Engines:
    """The forking engine server: real EngineCore processes in seconds instead of minutes."""

    def __init__(self, model: pathlib.Path, port: int, ranks: int, tag: str):
        self.tag = tag
        argv = [str(VLLM / "python"), "-u", str(shared() / "tools/vllm_live/fast_engine.py"), str(model), str(port)]
        if ranks > 1:
            argv += ["--dp", str(ranks)]
        self.process = Process(argv, WORK / f"{tag}.engines.log", ENGINE_ENV, stdin=subprocess.PIPE)
        self.process.log.write_text("")
        self.pids: dict[int, int] = {}

    def wait_imported(self):
        def ready():
            assert self.process.popen.poll() is None, "the engine server died:\n" + self.process.text()[-3000:]
            return "\nready " in "\n" + self.process.text()
        wait_for("vLLM imported", ready, START_S, 0.3)
        return self

    def say(self, line: str):
        self.process.popen.stdin.write(line.encode() + b"\n")
        self.process.popen.stdin.flush()

    def spawn(self, rank: int) -> int:
        already = len(re.findall(rf"spawned {rank} (\d+)", self.process.text()))
        self.say(f"spawn {rank} {WORK / f'{self.tag}.rank{rank}.log'}")
        pids = wait_for("engine spawned", lambda: (p if len(p := re.findall(rf"spawned {rank} (\d+)", self.process.text())) > already else None), 30)
        self.pids[rank] = int(pids[-1])
        return self.pids[rank]

    def signal(self, rank: int, sig: int):
        os.kill(self.pids[rank], sig)

    def stop(self):
        for pid in self.pids.values():
            for sig in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.kill(pid, sig)
                except ProcessLookupError:
                    pass
        self.process.stop(signal.SIGKILL)


class Group:
    """A gateway and its engines."""

    def __init__(self, kind: str, ranks: int, tag: str, gateway_args: list[str] | None = None):
        self.model = tiny_model(kind)
        self.rpc_port = free_port()
        self.socket_dir = WORK / f"s-{tag}"
        self.gateway_args = [str(self.model), "--served-model-name", "tiny", "--data-parallel-size", str(ranks),
                             "--data-parallel-rpc-port", str(self.rpc_port), "--socket-dir", str(self.socket_dir), *(gateway_args or [])]
        self.tag, self.ranks = tag, ranks
        self.engines = Engines(self.model, self.rpc_port, ranks, tag)
        self.gateway = Server("gateway", self.gateway_args, WORK / f"{tag}.gateway.log")
        self.gateway.log.write_text("")

    def start(self):
        self.engines.wait_imported()
        for rank in range(self.ranks):
            self.engines.spawn(rank)
        self.gateway.wait_ready(START_S)
        return self

    def restart_gateway(self, sig: int):
        port = self.gateway.port
        self.gateway.stop(sig)
        self.gateway = Server("gateway", self.gateway_args, WORK / f"{self.tag}.gateway.log", port=port)

    def stop(self):
        self.gateway.stop()
        self.engines.stop()

    def complete(self, timeout: float = 120, **body):
        return self.gateway.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, **body}, timeout)

    def chat(self, timeout: float = 120, **body):
        return self.gateway.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}],
                                                          "max_tokens": 4, "temperature": 0, **body}, timeout)

    def state(self, rank: int) -> str:
        for line in self.gateway.get("/metrics")[1].decode().splitlines():
            if line.startswith("rankgate_rank_state{") and f'rank="{rank}"' in line and line.endswith(" 1"):
                return re.search(r'state="([a-z]+)"', line).group(1)
        return "?"

    def wait_state(self, rank: int, state: str, seconds: float):
        wait_for(f"rank {rank} {state}", lambda: self.state(rank) == state, seconds, 0.02)


@pytest.fixture(scope="session")
def dense1():
    group = Group("dense", 1, "dense1")
    try:
        yield group.start()
    finally:
        group.stop()


@pytest.fixture(scope="session")
def dense2():
    group = Group("dense", 2, "dense2")
    try:
        yield group.start()
    finally:
        group.stop()


@pytest.fixture(scope="session")
def lock2():
    group = Group("lock", 2, "lock2")
    try:
        yield group.start()
    finally:
        group.stop()
