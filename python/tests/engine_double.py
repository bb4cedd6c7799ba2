# SPDX-License-Identifier: Apache-2.0
"""Small doubles of what the drop-in leans on in FreeToken and mini-sglang: config, queues, messages, the mixin's constructor. No engine code.

The mixin's double has the public one's methods and attributes and nothing else: what the drop-in needs beyond them it must bring itself.
"""

import os
import sys

import msgpack
import zmq

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
from scheduler_io import RelayIO  # noqa: E402


class Message:
    """What the decoder makes of a frame."""

    def __init__(self, kind, uid):
        self.kind, self.uid = kind, uid

    @staticmethod
    def decoder(fields):
        return Message(fields["kind"], fields["uid"])


class PullQueue:
    def __init__(self, address, create, decoder):
        assert create
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(address)
        self.decoder = decoder

    def get_raw(self):
        return self.socket.recv()

    def empty(self):
        return self.socket.poll(timeout=0) == 0

    def decode(self, raw):
        return self.decoder(msgpack.unpackb(raw, raw=False))

    def get(self):
        return self.decode(self.get_raw())


class TpInfo:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def is_primary(self):
        return self.rank == 0


class Settings:
    offline_mode = False

    def __init__(self, rank, size, where, pull):
        self.tp_info = TpInfo(rank, size)
        self._where, self._pull = where, pull

    @property
    def zmq_scheduler_broadcast_addr(self):
        return "ipc://" + self._where

    @property
    def zmq_backend_addr(self):
        return self._pull


class OriginalMixin:
    """Builds the sockets that the original builds; those between ranks must never come about under the relay."""

    def __init__(self, config, tp_cpu_group):
        self.tp_cpu_group = tp_cpu_group
        if config.offline_mode:
            self.receive_msg, self.send_result = self.offline_receive_msg, self.offline_send_result
            return
        assert config.tp_info.size == 1, "PUB or SUB beside the relay"
        if config.tp_info.is_primary():
            self._recv_from_tokenizer = PullQueue(config.zmq_backend_addr, create=True, decoder=Message.decoder)
            self._send_into_tokenizer = []
        self.receive_msg, self.send_result = self._recv_msg_single_rank, self._reply_tokenizer_rank0

    def run_when_idle(self):
        raise NotImplementedError

    def offline_receive_msg(self, blocking=False):
        return []

    def offline_send_result(self, reply):
        pass

    def _recv_msg_single_rank(self, blocking=False):
        messages = []
        if blocking:
            self.run_when_idle()
            messages.append(self._recv_from_tokenizer.get())
        while not self._recv_from_tokenizer.empty():
            messages.append(self._recv_from_tokenizer.get())
        return messages

    def _reply_tokenizer_rank0(self, reply):
        self._send_into_tokenizer += reply

    def _reply_tokenizer_rank1(self, reply):
        pass


class SchedulerIO(RelayIO, OriginalMixin):
    decoder = staticmethod(Message.decoder)


class Scheduler(SchedulerIO):
    """Finishes a request after three turns; computes `running` from its own state alone."""

    def __init__(self, rank, size, where, pull, offline=False):
        self.running = {}
        self.idle_calls = 0
        settings = Settings(rank, size, where, pull)
        settings.offline_mode = offline
        super().__init__(settings, tp_cpu_group="group")

    def run_when_idle(self):
        self.idle_calls += 1

    def step(self, messages):
        for message in messages:
            if message.kind == "abort":
                self.running.pop(message.uid, None)
            else:
                self.running[message.uid] = 3
        self.running = {uid: left - 1 for uid, left in self.running.items() if left > 1}
        self.send_result(list(self.running))
