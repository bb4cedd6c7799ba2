"""Tensor-parallel request relay: rank 0 publishes steps, ranks 1..N-1 receive them; nothing is lost and nobody waits for ever.

A step is one list of frames (bytes-like objects), the empty list included. All ranks see the same steps in the same order. The first
failure anywhere (a rank dies, stalls, diverges, is missing at the start) ends the group: every later call on every rank raises that
same cause as a `RelayError`.

    leader = Leader(Config(rank=0, size=2, where=path, epoch=1))      follower = Follower(Config(rank=1, size=2, where=path, epoch=1))
    leader.join()                                                     follower.join()
    leader.publish([b"request"])                                      step = follower.next_step()
    leader.finish()                                                   follower.finish()

Every waiting call releases the GIL and lets Python signal handlers run. After os.fork() the child's copies are inert.
"""

import atexit as _atexit

from ._native import Follower, JoinReport, Leader, Step
from ._native import close_all as _close_all
from .config import Config
from .errors import (
    BadEpoch,
    Closed,
    Corrupt,
    Diverged,
    DuplicateRank,
    ForeignFrame,
    JoinTimeout,
    LeaderDied,
    PeerDied,
    PeerStalled,
    PublishStalled,
    RelayError,
    RemoteFailure,
    SequenceGap,
    TooLarge,
    VersionMismatch,
)

# The relay's threads must not run into an interpreter that is going away.
_atexit.register(_close_all)

__all__ = [
    "BadEpoch",
    "Closed",
    "Config",
    "Corrupt",
    "Diverged",
    "DuplicateRank",
    "Follower",
    "ForeignFrame",
    "JoinReport",
    "JoinTimeout",
    "Leader",
    "LeaderDied",
    "PeerDied",
    "PeerStalled",
    "PublishStalled",
    "RelayError",
    "RemoteFailure",
    "SequenceGap",
    "Step",
    "TooLarge",
    "VersionMismatch",
]
