"""What may be given as a group, and what is said about everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeco_compile.lowering import torch_private
from zeco_compile.lowering.groups import (
    GroupChanged,
    InvalidGroup,
    SameGroup,
    members,
    refuse_other_order,
    resolve_group,
    resolve_group_and_size,
)


def test_without_a_process_group_there_is_one_rank() -> None:
    assert not dist.is_initialized()
    assert resolve_group() == ""
    assert resolve_group_and_size(None) == ("", 1)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([0, 1], r"is \[0, 1\] \(a list\).*dist.new_group\(\[0, 1\]\)"),
        (range(2), r"dist.new_group\(\[0, 1\]\)"),
        (torch.tensor([0, 1]), "a tensor of ranks"),
        ("cp", "its name"),
        (3, r"is 3 \(a int\)"),
        (True, "None, a torch.distributed.ProcessGroup or a one-dimensional DeviceMesh"),
        (object, "a type"),
        (dist.GroupMember.NON_GROUP_MEMBER, "not in the process group"),
    ],
)
def test_what_is_no_group(group: Any, message: str) -> None:
    with pytest.raises(InvalidGroup, match=message):
        resolve_group(group)


def _names(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    found: dict[str, Any] = {}

    def note(name: str, group: Any) -> None:
        try:
            resolved, size = resolve_group_and_size(group)
            found[name] = (resolved != "", size, members(resolved).global_ranks)
        except InvalidGroup as error:
            found[name] = str(error)

    note("none", None)
    note("world", dist.group.WORLD)
    halves = [dist.new_group([0, 1]), dist.new_group([3, 2], sort_ranks=False)]
    note("half", halves[rank // 2])
    note("other half", halves[1 - rank // 2])
    alone = [dist.new_group([each]) for each in range(4)]
    note("alone", alone[rank])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    note("2-D mesh", square)
    note("2-D mesh without names", DeviceMesh("cpu", [[0, 1], [2, 3]]))
    note("mesh dimension", square["cp"])
    note("mesh", init_device_mesh("cpu", (4,)))
    note("mesh of some", DeviceMesh("cpu", [1, 2]))
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        try:
            refuse_other_order(DeviceMesh("cpu", order))
            found[f"order {order}"] = ""
        except InvalidGroup as error:
            found[f"order {order}"] = str(error)
    gone = dist.new_group([0, 1, 2, 3])
    dist.barrier(gone)
    dist.destroy_process_group(gone)
    note("destroyed", gone)
    store = dist.PrefixStore("by hand", torch_private.default_store())
    timeout = torch_private.group_timeout(halves[rank // 2])
    note("by hand", torch_private.make_gloo_group(store, rank, 4, timeout))
    return found


def test_groups_and_meshes(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4).run(_names)):
        half = ((0, 1), (3, 2))[rank // 2]
        assert found["none"] == found["world"] == found["mesh"] == (True, 4, (0, 1, 2, 3))
        assert found["half"] == (True, 2, half)
        assert found["alone"] == (False, 1, (rank,))
        assert found["mesh dimension"] == (True, 2, ((0, 1), (2, 3))[rank // 2])
        assert f"(global rank {rank}) is not in the process group" in found["other half"]
        assert "2 dimensions (shape (2, 2), names ('dp', 'cp'))" in found["2-D mesh"]
        assert 'mesh["cp"]' in found["2-D mesh"]
        assert "mesh_dim_names" in found["2-D mesh without names"]
        if rank in (1, 2):
            assert found["mesh of some"] == (True, 2, (1, 2))
        else:
            assert "is not in the DeviceMesh" in found["mesh of some"]
        assert found["order [0, 1, 2, 3]"] == ""
        assert "in the order [0, 1, 2, 3]" in found["order [1, 0, 3, 2]"]
        assert "has been destroyed" in found["destroyed"]
        assert "made by hand" in found["by hand"]


def _traced(rank: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    sizes = []
    for group in (None, dist.group.WORLD, mesh):

        def scaled(x: torch.Tensor, group: Any = group) -> torch.Tensor:
            name, size = resolve_group_and_size(group)
            return x * size if name else x

        compiled = torch.compile(scaled, backend="eager", fullgraph=True)
        sizes.append(compiled(torch.ones(())).item())
    return sizes


def test_dynamo_traces_it(ranks: Any) -> None:
    assert ranks(4).run(_traced) == [[4.0, 4.0, 2.0]] * 4


def test_a_group_that_is_made_or_destroyed_is_another() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    nobody = SameGroup()
    nobody.refuse_another()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        two = SameGroup()
        two.refuse_another()
        with pytest.raises(GroupChanged, match=r"torch\._dynamo\.reset"):
            nobody.refuse_another()
    finally:
        dist.destroy_process_group()
    with pytest.raises(GroupChanged):
        two.refuse_another()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        with pytest.raises(GroupChanged):
            two.refuse_another()
    finally:
        dist.destroy_process_group()
    nobody.refuse_another()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        nobody.refuse_another()  # one rank is one rank
    finally:
        dist.destroy_process_group()
