"""The relay's errors: one subclass of RelayError per code. They pickle, so that a rank can hand its error to its launcher."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Type


class RelayError(RuntimeError):
    """The recorded first cause of a group's end, or (too_large, closed) why one call was refused."""

    code: str
    """One of the names in `CODES`."""
    origin_rank: Optional[int]
    """The rank the failure is about."""
    phase: str
    """Where in its life the group was: dial, hello, welcome, ready, go, ack, publish, read, run, digest, finish, close."""
    step: Optional[int]
    """The step it happened at, if it is about one."""
    deadline_s: Optional[float]
    """The budget that ran out, if one did."""
    missing: List[int]
    """The ranks that were not there (join_timeout, finish)."""

    code = "remote_failure"

    def __init__(
        self,
        text: str = "",
        *,
        origin_rank: Optional[int] = None,
        phase: str = "none",
        step: Optional[int] = None,
        deadline_s: Optional[float] = None,
        missing: Optional[List[int]] = None,
    ) -> None:
        self.text = text
        self.origin_rank = origin_rank
        self.phase = phase
        self.step = step
        self.deadline_s = deadline_s
        self.missing = list(missing or [])
        super().__init__(self._describe())

    def _describe(self) -> str:
        parts = [f"phase {self.phase}"]
        if self.origin_rank is not None:
            parts.insert(0, f"rank {self.origin_rank}")
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.deadline_s is not None:
            parts.append(f"deadline {self.deadline_s:g} s")
        if self.missing:
            parts.append(f"missing {self.missing}")
        return f"{self.code} ({', '.join(parts)})" + (f": {self.text}" if self.text else "")

    def __reduce__(self) -> Tuple[Any, ...]:
        return (make_error, (self.code, self.text, self.origin_rank, self.phase, self.step, self.deadline_s, self.missing))


class JoinTimeout(RelayError):
    """Not every rank was there when the join budget ended; `missing` names them on every rank that was."""

    code = "join_timeout"


class PeerDied(RelayError):
    """A follower's process or connection is gone."""

    code = "peer_died"


class LeaderDied(RelayError):
    """Rank 0's process or connection is gone."""

    code = "leader_died"


class PeerStalled(RelayError):
    """A rank showed no life for stall_after_s, or did not come to finish()."""

    code = "peer_stalled"


class PublishStalled(RelayError):
    """The slowest follower made no progress for publish_stall_s."""

    code = "publish_stalled"


class SequenceGap(RelayError):
    """A slot was skipped."""

    code = "sequence_gap"


class BadEpoch(RelayError):
    """This rank, or a slot, belongs to another start of the group."""

    code = "bad_epoch"


class ForeignFrame(RelayError):
    """Something that is not the next piece of this stream."""

    code = "foreign_frame"


class Corrupt(RelayError):
    """A checksum or a length is wrong."""

    code = "corrupt"


class TooLarge(RelayError):
    """A frame above max_frame. Nothing was sent; the group goes on."""

    code = "too_large"


class VersionMismatch(RelayError):
    """Another version of the relay, another group size, back-end or digest setting."""

    code = "version_mismatch"


class DuplicateRank(RelayError):
    """The rank is taken by a live process, or a second leader uses the same address."""

    code = "duplicate_rank"


class Diverged(RelayError):
    """A rank's digest differs from the others' at `step`."""

    code = "diverged"


class RemoteFailure(RelayError):
    """A rank called fail(), was interrupted half-way through a step, or lost its launcher."""

    code = "remote_failure"


class Closed(RelayError):
    """This end is closed or not joined, or rank 0 has finished and every step was read. No failure of the group."""

    code = "closed"


CODES: Dict[str, Type[RelayError]] = {
    cls.code: cls
    for cls in (
        JoinTimeout,
        PeerDied,
        LeaderDied,
        PeerStalled,
        PublishStalled,
        SequenceGap,
        BadEpoch,
        ForeignFrame,
        Corrupt,
        TooLarge,
        VersionMismatch,
        DuplicateRank,
        Diverged,
        RemoteFailure,
        Closed,
    )
}


def make_error(
    code: str,
    text: str,
    origin_rank: Optional[int],
    phase: str,
    step: Optional[int],
    deadline_s: Optional[float],
    missing: List[int],
) -> RelayError:
    """The error object for a code; used by the native module and by pickle."""
    cls = CODES.get(code, RemoteFailure)
    return cls(text, origin_rank=origin_rank, phase=phase, step=step, deadline_s=deadline_s, missing=missing)
