"""Everything this folder uses of torch that is not public API, one named function each.

A new torch that moves one of them makes ``tests/lowering/test_torch_private.py`` fail with its name, and one place
to mend.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def process_group_of_name(name: str) -> dist.ProcessGroup:
    """The process group registered in this process under ``name``; RuntimeError if there is none."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_registered_group(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` was made by torch.distributed and has not been destroyed."""
    return group in c10d._world.pg_map


def timeout_of_group(group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout given when the group was made. With several backends (``cpu:gloo,cuda:nccl``), the longest."""
    return max(group._get_backend(device).options._timeout for device in group._device_types)


def default_store() -> dist.Store:
    """The key-value store through which the ranks of the default process group found each other."""
    return c10d._get_default_store()


def make_gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A gloo process group that torch.distributed knows nothing of; its ranks meet through ``store``.

    ``dist.new_group`` would register it in the world, where the name of every later group that is made with local
    synchronisation depends on how many groups this process has: on a rank in more groups than its peer, such a
    group would wait for the peer under another name.
    """
    return c10d.ProcessGroupGloo(store, rank, world_size, timeout)
