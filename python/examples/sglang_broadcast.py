# SPDX-License-Identifier: Apache-2.0
"""Drop-in for SGLang's broadcast_pyobj: same call shape, one relay per process group, no collective.

    register(group, ranks=[4, 5, 6, 7], rank=6, where=path, epoch=launch)     # once, at start-up, on every rank of the group
    reqs = broadcast_pyobj(reqs, rank, dist_group=group, src=4)               # every loop turn, as before

`rank`, `src` and `ranks` are global ranks; the relay's own rank is the index in the group. The source must be the group's first rank.
Requests are pickled as they are today: use it only among ranks that trust each other.
"""

import pickle

from rankgate import relay

_relays = {}


def register(group, *, ranks, rank, where, epoch, **options):
    """Joins this rank's end of the relay for a process group (any hashable key)."""
    index = ranks.index(rank)  # ValueError: a rank that is not of this group
    config = relay.Config(rank=index, size=len(ranks), where=where, epoch=epoch, **options)
    end = relay.Leader(config) if index == 0 else relay.Follower(config)
    end.join()
    _relays[group] = (end, ranks[0], rank)
    return end


def broadcast_pyobj(data, rank, dist_group=None, src=0, force_cpu_device=True):
    """The source returns its own objects, everybody else equal ones."""
    end, first, own = _relays[dist_group]
    if src != first or rank != own:
        raise ValueError(f"rank {rank} and source {src} do not fit a group that starts at rank {first} (this is rank {own})")
    if rank == src:
        end.publish([pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)] if len(data) else [])
        return data
    step = end.next_step()
    return pickle.loads(step[0]) if len(step) else []


def unregister(group, timeout_s=5.0):
    """The orderly end, on every rank of the group."""
    end, _, _ = _relays.pop(group)
    end.finish(timeout_s)
    end.close()
