"""A frontend for tests of the engine end: binds, shakes hands, sends, collects. Single-threaded: nothing happens outside pump()."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from rankgate_process import free_port, hangup, program  # noqa: E402

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode
ADD, ABORT, START_DP_WAVE, UTILITY = b"\0", b"\1", b"\2", b"\3"
DEAD = b"ENGINE_CORE_DEAD"


def identity(rank: int) -> bytes:
    return rank.to_bytes(2, "little")


class Frontend:
    """Sockets of one frontend group. Ranks are started with start() and end with close()."""

    def __init__(self, clients: int = 1, coordinator: bool = False, scheme: str = "file"):
        self.dir = tempfile.TemporaryDirectory(prefix="rge")
        self.scheme = scheme
        self.ports: dict[tuple[str, int], int] = {}
        self.ctx = zmq.Context()
        self.poller = zmq.Poller()
        self.handshake = self.bind(zmq.ROUTER, "tcp://127.0.0.1:*")
        self.handshake.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.port = int(self.handshake.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1].rstrip(b"\0"))
        self.clients = clients
        self.open_data(clients)
        self.xpub = self.pull = None
        addresses = {"inputs": [self.path("i", n) for n in range(clients)], "outputs": [self.path("o", n) for n in range(clients)],
                     "coordinator_input": None, "coordinator_output": None, "frontend_stats_publish_address": None}
        if coordinator:
            self.xpub = self.bind(zmq.XPUB, self.path("x", 0))
            self.xpub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.pull = self.bind(zmq.PULL, self.path("p", 0))
            addresses.update(coordinator_input=self.path("x", 0), coordinator_output=self.path("p", 0))
        self.init = pack({"addresses": addresses, "parallel_config": {}})
        self.processes: dict[int, subprocess.Popen] = {}
        self.hello, self.ready, self.facts = {}, {}, {}
        self.messages: list[tuple[int, list]] = []  # (client, decoded message), newest last
        self.dead = 0
        self.events: list[tuple[str, int]] = []
        self.coordinator_messages: list = []
        self.call = 0

    def path(self, kind: str, n: int) -> str:
        if self.scheme == "abstract":  # as libzmq writes a name that is no file
            return f"ipc://@{self.dir.name}/{kind}{n}"
        if self.scheme == "tcp":
            if (kind, n) not in self.ports:
                self.ports[kind, n] = free_port()
            return f"tcp://127.0.0.1:{self.ports[kind, n]}"
        return f"ipc://{self.dir.name}/{kind}{n}"

    def bind(self, kind: int, address: str) -> zmq.Socket:
        s = self.ctx.socket(kind)
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.RCVHWM, 0)
        s.setsockopt(zmq.SNDHWM, 0)
        if kind == zmq.ROUTER:
            s.setsockopt(zmq.ROUTER_MANDATORY, 1)
        s.bind(address)
        self.poller.register(s, zmq.POLLIN)
        return s

    def open_data(self, clients: int) -> None:
        self.ins = [self.bind(zmq.ROUTER, self.path("i", n)) for n in range(clients)]
        self.outs = [self.bind(zmq.PULL, self.path("o", n)) for n in range(clients)]
        self.monitors = [("input", self.ins[0], self.ins[0].get_monitor_socket()), ("output", self.outs[0], self.outs[0].get_monitor_socket())]
        for _, _, m in self.monitors:
            self.poller.register(m, zmq.POLLIN)

    def close_data(self) -> None:
        """As a gateway that dies: input and output sockets vanish."""
        for _, s, m in self.monitors:
            self.poller.unregister(m)
            s.disable_monitor()
        for s in self.ins + self.outs:
            self.poller.unregister(s)
            s.close()

    def start(self, rank: int, *args: str, model: str = "sim", runner: str = "sim", wait: bool = True) -> subprocess.Popen:
        page = os.path.join(self.dir.name, "load")
        argv = [program(), "engine", model, "--runner", runner, "--data-parallel-rpc-port", str(self.port), "--load-page-dir", page,
                "--data-parallel-rank", str(rank), *([] if "--data-parallel-size" in args else ["--data-parallel-size", str(rank + 1)]), *args]
        log = open(os.path.join(self.dir.name, f"rank{rank}.log"), "ab")
        with hangup(signal.SIG_DFL):
            self.processes[rank] = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        self.facts.pop(rank, None)
        self.ready.pop(rank, None)
        if wait:
            assert self.pump(60, lambda: (rank in self.facts and rank in self.ready) or self.processes[rank].poll() is not None) and \
                self.processes[rank].poll() is None, f"rank {rank} did not register: {self.log(rank)}"
        return self.processes[rank]

    def log(self, rank: int) -> str:
        return pathlib.Path(self.dir.name, f"rank{rank}.log").read_text()

    def pump(self, seconds: float, until=None) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            if until is not None and until():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for sock, _ in self.poller.poll(min(left, 0.05) * 1000):
                self.take(sock)

    def take(self, sock) -> None:
        for name, _, m in self.monitors:
            if sock is m:
                self.events.append((name, parse_monitor_message(m.recv_multipart())["event"]))
                return
        frames = sock.recv_multipart()
        if sock is self.handshake:
            message = unpack(frames[1])
            rank = int.from_bytes(frames[0], "little")
            if message["status"] == "HELLO":
                self.hello[rank] = message
                self.handshake.send_multipart([frames[0], self.init])
            else:
                self.ready[rank] = message
        elif sock in self.ins:
            self.facts[int.from_bytes(frames[0], "little")] = unpack(frames[1])
        elif sock is self.xpub:
            if frames[0] == b"\1":
                self.xpub.send(b"READY")
        elif sock is self.pull:
            self.coordinator_messages.append(unpack(frames[0]))
        elif frames[0] == DEAD:
            self.dead += 1
        else:
            self.messages.append((self.outs.index(sock), unpack(frames[0])))

    def send(self, kind: bytes, payload: bytes, rank: int = 0, client: int = 0) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                self.ins[client].send_multipart([identity(rank), kind, payload])
                return
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                self.pump(0.02)  # the rank is still reconnecting

    def disconnected(self, name: str) -> bool:
        return (name, zmq.EVENT_DISCONNECTED) in self.events

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        for _, s, _ in self.monitors:
            if not s.closed:
                s.disable_monitor()
        self.ctx.destroy(linger=0)
        self.dir.cleanup()


class VllmFrontend(Frontend):
    def add(self, rid: str, rank: int = 0, client: int = 0, prompt=(5, 6, 7), size: int = 21, **sampling) -> None:
        row = [rid, list(prompt), None, {"temperature": 0.0, "max_tokens": 4, **sampling}, None, time.time(), None, None, None, None, None,
               client, 0, 0, None, False, None, None, None, False, None]
        self.send(ADD, pack(row[:size]), rank, client)

    def rows(self, rid: str, client: int | None = None) -> list:
        return [o for c, m in self.messages if client in (None, c) for o in m[1] if o[0] == rid]

    def tokens(self, rid: str) -> list[int]:
        return [t for o in self.rows(rid) for t in o[1]]

    def finish(self, rid: str):
        return next((o[5] for o in self.rows(rid) if o[5] is not None), None)

    def run(self, rid: str, seconds: float = 30, **kw) -> list[int]:
        self.add(rid, **kw)
        assert self.pump(seconds, lambda: self.finish(rid) is not None), f"{rid}: no end"
        return self.tokens(rid)

    def stats(self, rank: int = 0):
        return next((m[2] for _, m in reversed(self.messages) if m[0] == rank and m[2] is not None), None)

    def utility(self, method: str, *args, rank: int = 0, client: int = 0, seconds: float = 10):
        self.call += 1
        call = self.call
        self.send(UTILITY, pack([client, call, method, list(args)]), rank, client)
        found = lambda: next((m[4] for _, m in self.messages if m[4] and m[4][0] == call), None)  # noqa: E731
        if not self.pump(seconds, lambda: found() is not None):
            return "no reply"
        _, failure, result = found()
        return failure if failure is not None else (result[1] if result is not None else None)


class TokenSpeedFrontend(Frontend):
    TAG = "TokenizedGenerateReqInput"

    def add(self, rid, rank: int = 0, prompt=(5, 6, 7), stream: bool = True, logprob: bool = False, max_new: int | None = 4,
            ignore_eos: bool = True, **fields) -> None:
        sampling = [max_new, None, fields.get("stop_ids"), fields.get("temperature", 1.0), 1.0, fields.get("top_k", 1), 0.0, 0.0, 0.0, 1.0,
                    0, None, None, None, None, ignore_eos, True, True, False, None, None, fields.get("stream_interval"), None, 0, None,
                    fields.get("n", 1), [], 0, True]
        self.send(ADD, pack([self.TAG, rid, None, None, None if prompt is None else list(prompt), sampling, logprob, -1, 0, None, stream]), rank)

    def rows(self, rid: str) -> list[dict]:
        found = []
        for _, m in self.messages:
            for i, r in enumerate(m[1]):
                if r == rid:
                    found.append({"ids": m[2][i], "finish": m[3][i], "prompt": m[4][i], "completion": m[5][i], "cached": m[6][i],
                                  "values": m[7][i], "tokens": m[8][i], "rank": m[9], "load": tuple(m[10:14])})
        return found

    def finish(self, rid: str):
        return next((r["finish"] for r in self.rows(rid) if r["finish"]), None)

    def run(self, rid: str, seconds: float = 30, **kw) -> list[dict]:
        self.add(rid, **kw)
        assert self.pump(seconds, lambda: self.finish(rid)), f"{rid}: no end"
        return self.rows(rid)
