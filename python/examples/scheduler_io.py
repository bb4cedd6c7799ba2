# SPDX-License-Identifier: Apache-2.0
"""Drop-in for the SchedulerIOMixin of FreeToken and mini-sglang: the relay in place of PUB/SUB and the per-step gloo count.

    class SchedulerIOMixin(RelayIO, OriginalSchedulerIOMixin): ...

Ranks join in the constructor, before "ready". The engine's gloo group stays for its barriers, off the step path.
"""

import zmq
from rankgate import relay


class RelayIO:
    def __init__(self, config, tp_cpu_group):
        tp = config.tp_info
        if config.offline_mode or tp.size == 1:
            super().__init__(config, tp_cpu_group)
            return
        # The parent builds PULL and PUSH of a single rank; a follower has no sockets at all.
        self.tp_cpu_group = tp_cpu_group
        where = config.zmq_scheduler_broadcast_addr.removeprefix("ipc://")
        settings = relay.Config(rank=tp.rank, size=tp.size, where=where, epoch=config.relay_epoch)
        if tp.is_primary():
            self._build_tokenizer_sockets(config)
            self._relay = relay.Leader(settings)
            self.receive_msg, self.send_result = self._receive_rank0, self._reply_tokenizer_rank0
        else:
            self._relay = relay.Follower(settings)
            self.receive_msg, self.send_result = self._receive_follower, self._reply_tokenizer_rank1
        self._relay.join()

    def _receive_rank0(self, blocking=False):
        queue = self._recv_from_tokenizer
        if blocking:
            self.run_when_idle()
            poller = zmq.Poller()
            poller.register(queue.socket, zmq.POLLIN)
            poller.register(self._relay.failure_fd(), zmq.POLLIN)
            while queue.empty():  # a follower's death must end this wait
                poller.poll()
                self._relay.check()
        raws = []
        while not queue.empty():
            raws.append(queue.get_raw())
        self._relay.publish(raws)
        return [queue.decode(raw) for raw in raws]

    def _receive_follower(self, blocking=False):
        if blocking:
            self.run_when_idle()
        return [self.decode_frame(frame) for frame in self._relay.next_step()]

    def finish_relay(self):
        """Call on every rank where the engine shuts down in order."""
        self._relay.finish()
        self._relay.close()
