"""A frontend whose every message is written and read by the published TokenSpeed package's own codec; pyzmq moves the bytes. What stands
in front of `rankgate engine --wire tokenspeed` here is what upstream's side of the wire accepts, not our idea of it."""
from __future__ import annotations

import pathlib
import signal
import sys
import tempfile
import time

import zmq
from conftest import VENV
from rankgate_process import Process, program, shared

for folder in (shared() / "tools/tokenspeed_live", VENV / "ts"):
    sys.path.insert(0, str(folder))
import ts_stub  # noqa: E402

ts_stub.install()
from tokenspeed.runtime.engine import io_struct, request_types, zmq_msgpack, zmq_wire  # noqa: E402
from tokenspeed.runtime.sampling.sampling_params import SamplingParams  # noqa: E402

import msgspec  # noqa: E402

DEAD = request_types.ENGINE_CORE_DEAD if hasattr(request_types, "ENGINE_CORE_DEAD") else zmq_msgpack.ENGINE_CORE_DEAD
OUTPUTS = io_struct.MsgpackDecoder(io_struct.BatchTokenIDOutSlim)
REQUESTS = io_struct.MsgpackEncoder()
GREETINGS = msgspec.msgpack.Decoder(zmq_wire.WireReadyMessage)
FACTS = msgspec.msgpack.Decoder(zmq_wire.WireEngineCoreReadyResponse)


class Frontend:
    def __init__(self):
        self.dir = tempfile.TemporaryDirectory(prefix="rgts")
        self.ctx = zmq.Context()
        self.inputs, self.outputs = (f"ipc://{self.dir.name}/{name}.sock" for name in ("in", "out"))
        self.inp, self.out, self.handshake = self.ctx.socket(zmq.ROUTER), self.ctx.socket(zmq.PULL), self.ctx.socket(zmq.ROUTER)
        self.inp.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.inp.bind(self.inputs)
        self.out.bind(self.outputs)
        self.port = self.handshake.bind_to_random_port("tcp://127.0.0.1")
        self.poller = zmq.Poller()
        for socket in (self.handshake, self.inp, self.out):
            self.poller.register(socket, zmq.POLLIN)
        self.init = zmq_wire.encode(zmq_wire.WireHandshakeInitMessage(
            addresses=zmq_wire.WireHandshakeAddresses(inputs=[self.inputs], outputs=[self.outputs])))
        self.greeted: list[tuple[bytes, str]] = []  # in order of arrival
        self.facts: dict[bytes, zmq_wire.WireEngineCoreReadyResponse] = {}
        self.batches: list[io_struct.BatchTokenIDOutSlim] = []
        self.dead = 0
        self.engines: list[Process] = []

    def spawn(self, base: int, rank: int, ranks: int, *args: str, runner: str = "sim") -> Process:
        log = pathlib.Path(self.dir.name) / f"rank{base + rank}.log"
        self.engines.append(Process(
            [program(), "engine", "sim", "--runner", runner, "--wire", "tokenspeed", "--data-parallel-rpc-port", str(self.port),
             "--zmq-engine-index", str(base), "--data-parallel-size", str(ranks), "--data-parallel-rank", str(rank), "--load-page-dir",
             f"{self.dir.name}/load", "--max-model-len", "1024", "--num-gpu-blocks", "64", *args], log))
        return self.engines[-1]

    def start(self, base: int = 0, ranks: int = 1, *args: str, runner: str = "sim") -> list[bytes]:
        """Every rank greets before any of them hears INIT; the later ones hear it first."""
        names = [zmq_msgpack._engine_identity(base + rank) for rank in range(ranks)]
        for rank in range(ranks):
            self.spawn(base, rank, ranks, *args, runner=runner)
        said = lambda status: {name for name, what in self.greeted if what == status}  # noqa: E731
        assert self.pump(60, lambda: said("HELLO") >= set(names)), self.logs()
        for name in reversed(names):
            self.handshake.send_multipart([name, self.init])
        assert self.pump(60, lambda: said("READY") >= set(names) and set(self.facts) >= set(names)), self.logs()
        return names

    def logs(self) -> str:
        return "\n".join(engine.text()[-1500:] for engine in self.engines)

    def pump(self, seconds: float, until=None) -> bool:
        deadline = time.monotonic() + seconds
        while not (until is not None and until()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for socket, _ in self.poller.poll(min(left, 0.05) * 1000):
                frames = socket.recv_multipart()
                if socket is self.handshake:
                    self.greeted.append((frames[0], GREETINGS.decode(frames[-1]).status))
                elif socket is self.inp:
                    assert len(frames) == 2, frames
                    self.facts[frames[0]] = FACTS.decode(frames[1])
                elif frames[0] == DEAD:
                    self.dead += 1
                else:
                    self.batches.append(OUTPUTS.decode(frames))
        return True

    def add(self, rid: str, to: bytes, ids=(1, 2, 300), logprob: bool = False, stream: bool = True, **sampling) -> None:
        sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        request = io_struct.TokenizedGenerateReqInput(rid=rid, input_ids=list(ids), sampling_params=SamplingParams(**sampling), return_logprob=logprob,
                                                      stream=stream)
        self.inp.send_multipart([to, zmq_wire.REQ_TYPE_ADD, *REQUESTS.encode(request)])

    def abort(self, to: bytes, *rids: str) -> None:
        self.inp.send_multipart([to, zmq_wire.REQ_TYPE_ABORT, zmq_wire.encode(list(rids))])

    def rows(self, rid: str) -> list[tuple[io_struct.BatchTokenIDOutSlim, int]]:
        return [(batch, batch.rids.index(rid)) for batch in self.batches if rid in batch.rids]

    def tokens(self, rid: str) -> list[int]:
        return [t for batch, i in self.rows(rid) for t in batch.output_ids[i]]

    def finish(self, rid: str) -> str:
        return next((batch.finished_reasons[i] for batch, i in self.rows(rid) if batch.finished_reasons[i]), "")

    def run(self, rid: str, to: bytes, seconds: float = 30, **kw) -> list[int]:
        self.add(rid, to, **kw)
        assert self.pump(seconds, lambda: self.finish(rid)), f"{rid}: no end\n{self.logs()}"
        return self.tokens(rid)

    def load(self, rank: int) -> tuple:
        last = next(batch for batch in reversed(self.batches) if batch.engine_index == rank)
        return last.num_running, last.num_waiting, last.kv_active_pages, last.kv_total_pages

    def close(self) -> None:
        for engine in self.engines:
            engine.stop(signal.SIGKILL)
        self.ctx.destroy(linger=0)
        self.dir.cleanup()
