"""Config: everything a rank has to say, validated once. Every rank of a group is given the same values but for `rank`."""

from __future__ import annotations

import dataclasses
import operator
import os
from typing import Callable, Optional

from . import _native
from .errors import RelayError

_INTEGERS = ("rank", "size", "epoch", "max_lag_steps", "max_frame", "guard_fd", "parent_death_signal", "spin_us")
_NUMBERS = ("join_s", "publish_stall_s", "stall_after_s", "beat_s", "exit_after_s")
_LIMITS = {"epoch": (0, 2**64 - 1), "max_frame": (1, 2**63 - 1)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one rank; a bad one raises ValueError, whose text starts with the field's name."""

    rank: int
    """This rank, 0..size-1 within its group (not a global rank)."""
    size: int
    """Ranks in the group, 1..64."""
    where: str
    """A path of the group's own in a folder only this user can write to, or tcp://host:port for ranks on several hosts.

    Also @name: a socket without a file, for ranks of one network namespace. Any local user sees the name; other users' ranks are refused."""
    epoch: int
    """Names this start of the group; a restarted group takes another one."""
    join_s: float = 30.0
    """One budget for the whole join, on every rank."""
    publish_stall_s: float = 60.0
    """How long publish may wait without progress of the slowest reader."""
    stall_after_s: float = 0.0
    """A rank without a beat for this long has failed; 0 = only reported (beat_ages). Rank 0's value counts for the group."""
    beat_s: float = 1.0
    """The longest time between two beats."""
    max_lag_steps: int = 2
    """How many steps rank 0 may be ahead of the slowest reader; 1 is lockstep."""
    max_frame: int = 64 << 20
    """Largest frame in bytes."""
    digest: bool = False
    """Compare set_digest() values of all ranks, step by step."""
    backend: str = "ring"
    """ring (shared memory), stream (unix sockets) or tcp; a tcp:// address means tcp."""
    on_failure: Optional[Callable[[RelayError], None]] = None
    """Called once from the relay's own thread when the group fails: for a main thread that is inside a device call."""
    exit_after_s: float = 0.0
    """If > 0, end this process (status 70) this long after a failure, whatever its main thread does."""
    guard_fd: int = -1
    """Read end of a pipe whose write end only the launcher holds: its end of file ends the group."""
    parent_death_signal: int = 0
    """Signal to get when the parent (thread) dies; 0 = none."""
    spin_us: int = -1
    """How long next_step looks for a step before it sleeps: -1 = only around the moment it can foresee, 0 = never, n = this many us. Unless it
    is 0 the waiting thread also asks the scheduler for short turns (100 us)."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in _INTEGERS:
            try:
                value = operator.index(getattr(self, name))
            except TypeError:
                raise ValueError(f"{name}: must be an integer, not {getattr(self, name)!r}") from None
            low, high = _LIMITS.get(name, (-(2**31), 2**31 - 1))
            if not low <= value <= high:
                raise ValueError(f"{name}: {value} is out of range")
            put(name, value)
        for name in _NUMBERS:
            try:
                put(name, float(getattr(self, name)))
            except (TypeError, ValueError):
                raise ValueError(f"{name}: must be a number, not {getattr(self, name)!r}") from None
        try:
            put("where", os.fsdecode(self.where))
            self.where.encode()
        except (TypeError, UnicodeError):
            raise ValueError(f"where: must be a path or an address, not {self.where!r}") from None
        put("digest", bool(self.digest))
        if not isinstance(self.backend, str):
            raise ValueError("backend: must be ring, stream or tcp")
        if self.where.startswith("tcp://") and self.backend == "ring":
            put("backend", "tcp")
        if self.on_failure is not None and not callable(self.on_failure):
            raise ValueError("on_failure: must be callable")
        _native.validate(self)
