"""The stock vLLM command under `rankgate serve --engine vllm`, and beside `rankgate gateway`: minutes of import time, so full lane only."""
import os
import signal

import pytest
from conftest import ENGINE_ENV, ENGINE_FLAGS, START_S, VLLM, WORK, tiny_model
from rankgate_process import Process, Server, free_port, wait_for

pytestmark = pytest.mark.slow


def children_of(pid: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = open(f"/proc/{entry}/stat").read()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
                found |= {int(entry)} | children_of(int(entry))
    return found


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def serve(kind: str, ranks: int, tag: str) -> Server:
    log = WORK / f"{tag}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    server = Server("serve", [str(tiny_model(kind)), "--engine", "vllm", "--engine-command", f"{VLLM}/vllm serve",
                              "--served-model-name", "tiny", "--shutdown-timeout", "5"], log, env=ENGINE_ENV,
                    engine_args=[*ENGINE_FLAGS, "--data-parallel-size", str(ranks), "--headless"])
    return server


def ask(server: Server, **body):
    return server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, **body}, 120)


@pytest.mark.parametrize("kind,ranks,launchers", [("dense", 1, 1), ("dense", 2, 2), ("lock", 2, 1)])
def test_serve_starts_supervises_and_leaves_nothing_behind(kind, ranks, launchers):
    server = serve(kind, ranks, f"serve-{kind}{ranks}")
    family = set()
    try:
        server.wait_ready(START_S)
        family = children_of(server.pid)
        direct = [p for p in family if open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()[1] == str(server.pid)]
        assert len(direct) == launchers
        assert "--data-parallel-size behind -- is dropped" in server.text()
        for rank in range(ranks):
            assert ask(server, data_parallel_rank=rank)[0] == 200
        if kind == "dense" and ranks == 2:
            # One rank's death: its sibling serves on, the supervisor brings it back.
            os.kill(direct[0], signal.SIGKILL)
            wait_for("the death is known", lambda: b"dead" in server.get("/health")[1] or b"gone" in server.get("/health")[1], 5)
            for _ in range(4):
                assert ask(server)[0] == 200
            server.wait_ready(START_S)
            family |= children_of(server.pid)
    finally:
        code = server.stop(signal.SIGINT)
    assert code == 130
    wait_for("no process left", lambda: not any(alive(p) for p in family), 10)


def test_gateway_beside_a_hand_started_headless_engine():
    model, port = tiny_model("dense"), free_port()
    log = WORK / "hand.gateway.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    gateway = Server("gateway", [str(model), "--served-model-name", "tiny", "--data-parallel-rpc-port", str(port)], log)
    engine = Process([f"{VLLM}/vllm", "serve", str(model), "--headless", *ENGINE_FLAGS, "--data-parallel-address", "127.0.0.1",
                      "--data-parallel-rpc-port", str(port)], WORK / "hand.engine.log", ENGINE_ENV)
    try:
        gateway.wait_ready(START_S)
        assert ask(gateway)[0] == 200
        status, reply = gateway.post("/v1/chat/completions", {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]})
        assert status == 200, reply
    finally:
        engine.stop()
        gateway.stop()
