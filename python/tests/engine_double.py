# SPDX-License-Identifier: Apache-2.0
"""Small doubles of what FreeToken's and mini-sglang's SchedulerIOMixin lean on: config, ZMQ queues, messages. No engine code."""

import os
import sys

import msgpack
import zmq

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
from scheduler_io import RelayIO  # noqa: E402


class PullQueue:
    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(address)

    def get_raw(self):
        return self.socket.recv()

    def empty(self):
        return self.socket.poll(timeout=0) == 0

    def decode(self, raw):
        return msgpack.unpackb(raw, raw=False)


class TpInfo:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def is_primary(self):
        return self.rank == 0


class Settings:
    offline_mode = False

    def __init__(self, rank, size, where, pull, epoch):
        self.tp_info = TpInfo(rank, size)
        self.zmq_scheduler_broadcast_addr = "ipc://" + where
        self.zmq_backend_addr = pull
        self.relay_epoch = epoch


class OriginalMixin:
    def _reply_tokenizer_rank0(self, reply):
        self.replies += len(reply)

    def _reply_tokenizer_rank1(self, reply):
        pass


class Scheduler(RelayIO, OriginalMixin):
    """Finishes a request after three turns; computes `running` from its own state alone."""

    def __init__(self, rank, size, where, pull, epoch):
        self.running = {}
        self.idle_calls = 0
        self.replies = 0
        super().__init__(Settings(rank, size, where, pull, epoch), tp_cpu_group=None)

    def _build_tokenizer_sockets(self, config):
        self._recv_from_tokenizer = PullQueue(config.zmq_backend_addr)

    def decode_frame(self, frame):
        return msgpack.unpackb(frame, raw=False)

    def run_when_idle(self):
        self.idle_calls += 1

    def step(self, messages):
        for message in messages:
            if message["kind"] == "abort":
                self.running.pop(message["uid"], None)
            else:
                self.running[message["uid"]] = 3
        self.running = {uid: left - 1 for uid, left in self.running.items() if left > 1}
        self.send_result(list(self.running))
