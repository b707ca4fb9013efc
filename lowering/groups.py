"""Which ranks share a sequence: from what the user hands over to a name, and from the name to its ranks.

The ops of this folder carry their process group as the group's name, since a graph that is compiled, cached
and loaded again in another process can hold a string but no process group. ``""`` is the name of "one
rank": no process group is initialised, or the group has one member. Who is in the group is looked up from
the name while the program runs (`members`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering import torch_private
from zeco_compile.lowering.errors import GroupNotFound

ONE_RANK = ""


class InvalidGroup(ZecoError):
    """What was given as ``group`` is not a process group that this rank can share a sequence with."""


class GroupChanged(ZecoError):
    """The ranks that share a sequence are not those that the graph was compiled for."""


class SameGroup:
    """Whether ``group``, which is what `resolve_group` takes, is still what it is now.

    A process group can be destroyed and made anew with other ranks, and the default one has the same name then: the
    number of ranks, and this one's place, are constants in compiled graphs.
    """

    def __init__(self, group: Any = None) -> None:
        self._asked = group
        self._then = self._process_group()
        self._several = self._then is not None and self._then.size() > 1

    def _process_group(self) -> dist.ProcessGroup | None:
        if self._asked is None:
            return dist.group.WORLD if _initialised() else None
        return self._asked.get_group() if _is_mesh(self._asked) else self._asked

    def refuse_another(self) -> None:
        """Raises GroupChanged."""
        now = self._process_group()
        if now is self._then and (now is None or torch_private.is_registered_group(now)):
            return
        if self._several or (now is not None and now.size() > 1):
            raise GroupChanged(
                "the model was compiled for another process group than there is now: one has been made, or "
                "destroyed, since. Call torch._dynamo.reset() after init_process_group() or "
                "destroy_process_group(), so that the model is compiled anew for the ranks that there are."
            )


def resolve_group(group: Any = None) -> str:
    """The name of ``group``, by which the ops of ``zeco::`` find it.

    ``group`` is ``None`` (all ranks if a default process group is initialised, else one rank), a
    ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Returns ``""`` when there is one rank only.
    Raises `InvalidGroup` for anything else, for a mesh of several dimensions, for a group that does not
    contain this rank, and for one that has been destroyed. Dynamo traces it as a constant.
    """
    return resolve_group_and_size(group)[0]


def resolve_group_and_size(group: Any = None) -> tuple[str, int]:
    """Name and number of ranks of ``group``, which is what `resolve_group` takes."""
    if group is None:
        if not _initialised():
            return ONE_RANK, 1
        group = dist.group.WORLD
    elif _is_mesh(group):
        group = _group_of_mesh(group)
    elif dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidGroup(
            f"this rank ({_rank_in_world()}) is not in the process group given as `group`: `dist.new_group` "
            "returned GroupMember.NON_GROUP_MEMBER here. Call this with the group that this rank is in, "
            "or only on the group's own ranks."
        )
    elif not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise InvalidGroup(
            f"`group` is {_describe(group)}, but has to be None, a torch.distributed.ProcessGroup or a "
            f"one-dimensional DeviceMesh.{_hint(group)}"
        )
    if not torch_private.is_registered_group(group):
        raise InvalidGroup(
            "the process group given as `group` is unknown to torch.distributed: it has been destroyed "
            "(`destroy_process_group`), or was made by hand. Pass a group from `dist.new_group`, or a "
            "DeviceMesh."
        )
    if group.rank() < 0:
        raise InvalidGroup(
            f"this rank ({_rank_in_world()}) is not in the process group given as `group` (ranks "
            f"{dist.get_process_group_ranks(group)}). Call this with the group that this rank is in."
        )
    size = group.size()
    return (ONE_RANK if size == 1 else str(group.group_name)), size


@dataclass(frozen=True)
class Members:
    """Who is in a group. ``global_ranks[p]`` is the world rank of group rank p."""

    rank: int
    world_size: int
    global_ranks: tuple[int, ...]


def members(group: str) -> Members:
    """This process's place in the group of that name; ``""`` is one rank alone. Makes nothing.

    Raises GroupNotFound when there is no such group, or this process is not in it.
    """
    if group == "":
        return Members(0, 1, (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,))
    parent = group_named(group)
    return Members(parent.rank(), parent.size(), tuple(dist.get_process_group_ranks(parent)))


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def group_named(group: str) -> dist.ProcessGroup:
    """Raises GroupNotFound when there is no such group, or this process is not in it."""
    try:
        found = torch_private.resolve_process_group(group)
    except (RuntimeError, KeyError, ValueError) as error:
        raise GroupNotFound(
            f"There is no process group named {group!r} in this process. It was there when the graph was "
            "compiled: do not destroy it while compiled models that use it live, and compile again after "
            f"init_process_group was called anew. PyTorch said: {first_line(error)}"
        ) from error
    if found.rank() < 0:
        raise GroupNotFound(
            f"This process is not a member of the process group {group!r}. Call the compiled model on its "
            "members only."
        )
    return found


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank_in_world() -> str:
    return f"global rank {dist.get_rank()}" if _initialised() else "no process group is initialised"


def _is_mesh(group: Any) -> bool:
    # Not isinstance alone: importing device_mesh is slow, and a build without distributed has no such module.
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh)


def _group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f'mesh["{names[-1]}"]' if names else 'a mesh with mesh_dim_names, and then mesh["cp"]'
        raise InvalidGroup(
            f"`group` is a DeviceMesh of {mesh.ndim} dimensions (shape {tuple(mesh.mesh.shape)}, names "
            f"{names}), and the sequence runs along one of them. Pass the one-dimensional part that shares "
            f"the sequence: {example}."
        )
    if mesh.get_coordinate() is None:
        raise InvalidGroup(
            f"this rank ({_rank_in_world()}) is not in the DeviceMesh given as `group` (ranks "
            f"{mesh.mesh.flatten().tolist()}). Call this only on the ranks of the mesh."
        )
    return mesh.get_group()


def refuse_other_order(group: Any) -> None:
    """Raises InvalidGroup for a DeviceMesh whose ranks stand in another order than in its process group."""
    if not _is_mesh(group):
        return
    wanted, ranks = group.mesh.flatten().tolist(), dist.get_process_group_ranks(group.get_group())
    if ranks != wanted:
        raise InvalidGroup(
            f"`group` is a DeviceMesh of the ranks {wanted}, in this order, but its process group has them in the "
            f"order {ranks}, and slices of the sequence are dealt out in the order of the group. Make the mesh with "
            "its ranks in ascending order."
        )


def _describe(group: Any) -> str:
    text = repr(group)
    return f"{text if len(text) <= 80 else text[:77] + '...'} (a {type(group).__name__})"


def _hint(group: Any) -> str:
    if isinstance(group, list | tuple | range) and all(isinstance(rank, int) for rank in group):
        return f" For these ranks: `dist.new_group({list(group)})`, called on every rank."
    if isinstance(group, torch.Tensor):
        return " For a tensor of ranks: `dist.new_group(ranks.tolist())`, called on every rank."
    if isinstance(group, str):
        return " For a dimension of a DeviceMesh by its name: `mesh[name]`."
    return ""
