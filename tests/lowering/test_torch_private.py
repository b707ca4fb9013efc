"""What the lowering uses of PyTorch's private parts still does what it is used for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from zeco_compile.lowering import torch_private

HINT = "PyTorch moved something private; see lowering/torch_private.py"


def _group_functions(rank: int) -> dict[str, Any]:
    import datetime

    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    found = {
        "resolved": torch_private.resolve_process_group(name) is world,
        "registered": torch_private.is_registered_group(world),
        "backends": torch_private.backend_names(world),
        "timeout": torch_private.group_timeout(world).total_seconds(),
    }
    try:
        torch_private.resolve_process_group("no such group")
        found["unknown"] = "resolved"
    except (RuntimeError, KeyError):
        found["unknown"] = "raised"

    store = dist.PrefixStore("test_torch_private", torch_private.default_store())
    group = torch_private.make_gloo_group(store, rank, 2, datetime.timedelta(seconds=30))
    found["made group is registered"] = torch_private.is_registered_group(group)
    mine = torch.full((3,), float(rank + 1))
    theirs = torch.zeros(3)
    works = [
        torch_private.receive(group, theirs, 1 - rank, 5),
        torch_private.send(group, mine, 1 - rank, 5),
    ]
    for work in works:
        work.wait()
    found["received"] = theirs.tolist()
    summed = mine.clone()
    torch_private.all_reduce(group, summed, dist.ReduceOp.SUM).wait()
    found["summed"] = summed.tolist()
    rows = torch.zeros(6)
    torch_private.all_gather(group, rows, mine).wait()
    found["gathered"] = rows[::3].tolist()
    spread = mine.clone()
    torch_private.broadcast(group, spread, 1).wait()
    found["spread"] = spread.tolist()
    return found


def test_groups(ranks):
    for rank, found in enumerate(ranks(2).run(_group_functions)):
        assert found["resolved"], HINT
        assert found["registered"], HINT
        assert found["backends"]["cpu"] == "gloo", HINT
        assert found["timeout"] == 60.0, HINT
        assert found["unknown"] == "raised", HINT
        assert not found["made group is registered"], HINT
        assert found["received"] == [2.0 - rank] * 3, HINT
        assert found["summed"] == [3.0] * 3, HINT
        assert found["gathered"] == [1.0, 2.0], HINT
        assert found["spread"] == [2.0] * 3, HINT


def _closing(rank: int) -> str:
    import datetime

    store = dist.PrefixStore("test_closing", torch_private.default_store())
    group = torch_private.make_gloo_group(store, rank, 2, datetime.timedelta(seconds=30))
    dist.barrier()  # a group that goes while the other rank still connects is another error
    if rank == 0:
        del group
        return "dropped"
    try:
        torch_private.receive(group, torch.zeros(1), 0, 0).wait()
    except RuntimeError as error:
        return str(error)
    return "received"


def test_a_dropped_gloo_group_closes_its_connections(ranks):
    text = ranks(2).run(_closing, seconds=20)[1]  # which of the two depends on who was reading
    assert "closed" in text or "reset" in text, HINT


def test_storage_key_is_the_storage():
    x = torch.zeros(4)
    assert torch_private.storage_key(x) == torch_private.storage_key(x[1:].view(3, 1)), HINT
    assert torch_private.storage_key(x) != torch_private.storage_key(torch.zeros(4)), HINT


def test_nccl_and_coalescing_exist():
    # cannot run here without a GPU; tests/cuda/check_attention.py runs them
    assert hasattr(dist.ProcessGroup, "_start_coalescing"), HINT
    assert hasattr(dist.ProcessGroup, "_end_coalescing"), HINT
    assert hasattr(dist.ProcessGroup, "abort"), HINT
    assert hasattr(dist.ProcessGroup.BackendType, "NCCL"), HINT


def test_symmetric_memory_exists():
    # cannot run here without GPUs; tests/cuda/check_all_scan.py runs it
    from torch.distributed import _symmetric_memory

    assert callable(_symmetric_memory.empty), HINT
    assert list(inspect.signature(_symmetric_memory.rendezvous).parameters) == ["tensor", "group"], HINT
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "get_buffer"), HINT
