"""Everything the lowering uses of PyTorch that PyTorch does not promise to keep.

One named function each, so that a version in which something moved fails in one place; each has a test in
tests/lowering/test_torch_private.py. Tried with torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. Raises RuntimeError (or a subclass, or KeyError) when there is none."""
    return c10d._resolve_process_group(cast(Any, name))


def default_store() -> dist.Store:
    """The key-value store of the default group, through which new groups find each other."""
    return c10d._get_default_store()


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend the group uses for which device type, for example ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(c10d.BackendConfig(c10d.Backend(dist.get_backend_config(group))).get_device_backend_map())


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The longest timeout among the group's backends; PyTorch's default where none of them tells.

    Not every backend carries options (the fake one of PyTorch's tests does not).
    """
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout)
    return max(found) if found else c10d.default_pg_timeout


def make_gloo_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group that c10d's global tables do not know, over ``store`` (give it a prefix of its own).

    Not ``dist.new_group(use_local_synchronization=True)``: that derives the new group's name from the number
    of groups that the process has made so far, which differs between the ranks of overlapping groups, and
    then hangs. Dropping the last reference closes the connections, at which the peers' transfers fail.
    """
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
    return _wrap(store, rank, world_size, backend, dist.ProcessGroup.BackendType.GLOO, "cpu")


def make_nccl_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    global_ranks: tuple[int, ...],
    name: str,
) -> dist.ProcessGroup:
    """The same for NCCL, with high-priority streams.

    ``dist.new_group`` would split the default group's communicator when that one is bound to a device, and
    a split is collective over the whole world, also for ranks outside the new group.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.global_ranks_in_group = list(global_ranks)
    options.group_name = cast(Any, name)
    backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    return _wrap(store, rank, world_size, backend, dist.ProcessGroup.BackendType.NCCL, "cuda")


def _wrap(
    store: dist.Store, rank: int, world_size: int, backend: Any, kind: Any, device: str
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def send(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
    """Start sending a contiguous tensor to group rank ``peer``."""
    return group.send([tensor], peer, tag)


def receive(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
    """Start receiving into a contiguous tensor from group rank ``peer``."""
    return group.recv([tensor], peer, tag)


def start_coalescing(group: dist.ProcessGroup, device: torch.device) -> None:
    """From here on NCCL transfers are collected into one ncclGroup, until :func:`end_coalescing`."""
    group._start_coalescing(device)


def end_coalescing(group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Launch the collected transfers; the work stands for all of them."""
    return group._end_coalescing(device)


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: Any) -> dist.Work:
    """Start reducing a contiguous tensor in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def all_gather(group: dist.ProcessGroup, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
    """Start gathering contiguous ``tensor`` of every rank into contiguous ``output`` [world_size * numel]."""
    return group._allgather_base(output, tensor)


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, owner: int) -> dist.Work:
    """Start spreading the owner's contiguous tensor, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = owner
    return group.broadcast([tensor], options)


def abort(group: dist.ProcessGroup) -> None:
    """Give up everything in flight on the group (NCCL; gloo ignores it)."""
    group.abort()


def symmetric_memory(
    size: int, device: torch.device, group: str, prepare: Callable[[torch.Tensor], None]
) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
    """``size`` bytes on ``device`` that the other ranks of the group can read and write, and a function from a rank of
    the group to its bytes, as seen from here.

    Collective: every rank of the group has to ask for the same size. ``prepare`` is called before others can see the
    memory. Raises RuntimeError where devices or processes cannot share memory.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    prepare(memory)
    handle = _symmetric_memory.rendezvous(memory, cast(Any, group))
    return memory, lambda rank: handle.get_buffer(rank, (size,), torch.uint8)


def abandon(group: dist.ProcessGroup) -> None:
    """Leaves a gloo group to itself, with what is in flight on it: its destructor would wait for that until the group's
    timeout, at the exit of the process too. The threads end with the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def storage_key(tensor: torch.Tensor) -> int:
    """An identity of the tensor's storage, unique while the storage lives."""
    return tensor.untyped_storage()._cdata


def is_registered_group(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed made ``group`` and has not destroyed it since."""
    return group in c10d._world.pg_map
