# SPDX-License-Identifier: Apache-2.0
"""Drop-in for the SchedulerIOMixin of FreeToken and mini-sglang: the relay in place of PUB/SUB and the per-step gloo count.

    class SchedulerIOMixin(RelayIO, OriginalSchedulerIOMixin):  # joins in its constructor, before "ready"; gloo keeps its barriers
        decoder = staticmethod(BaseBackendMsg.decoder)
"""

import types
import zlib

import msgpack
import zmq
from rankgate import relay


class _OneRank:  # the config as of a single rank: for that the original builds its PULL and PUSH, and nothing between ranks
    tp_info = types.SimpleNamespace(rank=0, size=1, is_primary=lambda: True)

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        return getattr(self._config, name)


class RelayIO:
    def __init__(self, config, tp_cpu_group):
        tp, self.tp_cpu_group = config.tp_info, tp_cpu_group
        if config.offline_mode or tp.size == 1:
            return super().__init__(config, tp_cpu_group)
        where = config.zmq_scheduler_broadcast_addr.removeprefix("ipc://")  # ends in the launcher's pid: every start has its own
        settings = relay.Config(rank=tp.rank, size=tp.size, where=where, epoch=zlib.crc32(where.encode()))
        if tp.is_primary():
            super().__init__(_OneRank(config), tp_cpu_group)
            self._relay, self.receive_msg = relay.Leader(settings), self._receive_rank0
        else:  # a follower has no sockets at all
            self._relay, self.receive_msg = relay.Follower(settings), self._receive_follower
            self.send_result = self._reply_tokenizer_rank1
        self._relay.join()

    def _receive_rank0(self, blocking=False):
        queue, raws = self._recv_from_tokenizer, []
        if blocking:
            self.run_when_idle()
            while queue.empty() and not self._relay.check():  # a follower's death must end this wait
                zmq.select([queue.socket, self._relay.failure_fd()], [], [])
        while not queue.empty():
            raws.append(queue.get_raw())
        self._relay.publish(raws)
        return [queue.decode(raw) for raw in raws]

    def _receive_follower(self, blocking=False):
        if blocking:
            self.run_when_idle()
        return [self.decoder(msgpack.unpackb(frame, raw=False)) for frame in self._relay.next_step()]

    def finish_relay(self):  # on every rank, where the engine shuts down in order
        self._relay.finish()
        self._relay.close()
