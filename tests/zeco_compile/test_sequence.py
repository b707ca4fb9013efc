"""shard_sequence and gather_sequence, as a user calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering.agreement import RankMissing
from zeco_compile.lowering.errors import UnequalShards
from zeco_compile.lowering.exchange_parts import IndivisibleSequence, InvalidExchange
from zeco_compile.lowering.groups import InvalidGroup
from zeco_compile.sequence import gather_sequence, shard_sequence


@pytest.fixture
def pool(ranks: Any) -> Any:
    return ranks(3)


def test_on_one_rank_they_copy() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    for function in (shard_sequence, gather_sequence):
        y = function(x)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))


@pytest.mark.parametrize("function", [shard_sequence, gather_sequence])
def test_bad_arguments(function: Any) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(InvalidExchange, match="dimension 2 of a tensor with 2 dimensions"):
        function(x, 2)
    with pytest.raises(InvalidExchange, match="dimension -3"):
        function(x, -3)
    with pytest.raises(InvalidExchange, match="a dimension is an int"):
        function(x, "sequence")
    with pytest.raises(InvalidExchange, match="this is a list"):
        function([1, 2])
    with pytest.raises(InvalidGroup, match="new_group"):
        function(x, 1, [0, 1])
    assert issubclass(InvalidExchange, ZecoError)


def _round_trip(rank: int, full: Tensor, weights: list[Tensor], how: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    group = init_device_mesh("cpu", (3,)) if how == "mesh" else None

    def through(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = shard_sequence(x, -2, group)
        squared = mine * mine
        return mine, squared, gather_sequence(squared, -2, group)

    if how in ("aot_eager", "inductor"):
        through = torch.compile(through, backend=how, fullgraph=True, dynamic=True)
    leaf = full.clone().requires_grad_()
    mine, squared, gathered = through(leaf)
    objective = (gathered * weights[rank]).sum()
    if how in ("eager", "mesh"):
        whole, slice_gradient = torch.autograd.grad(objective, (leaf, squared))
    else:  # in one compiled graph there is no path from one of its results to another
        (whole,), slice_gradient = torch.autograd.grad(objective, leaf), torch.zeros(())
    return [mine.detach(), gathered.detach(), whole, slice_gradient]


@pytest.mark.parametrize("how", ["eager", "mesh", "aot_eager", "inductor"])
def test_there_and_back(pool: Any, how: str) -> None:
    full = torch.randn(2, 6, 2, dtype=torch.float64)
    weights = [torch.randn_like(full) for _ in range(3)]
    results = pool.run(_round_trip, full, weights, how)
    total = sum(weights)
    for rank, (mine, gathered, whole, slice_gradient) in enumerate(results):
        place = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(mine, full[:, place])
        assert torch.allclose(gathered, full**2)
        expected = torch.zeros_like(full)
        expected[:, place] = (2 * full * total)[:, place]
        assert torch.allclose(whole, expected, 1e-13, 1e-13)
        if how in ("eager", "mesh"):
            assert torch.allclose(slice_gradient, total[:, place], 1e-13, 1e-13)
    # summed over the ranks, the parts are the gradient of the unsharded computation
    leaf = full.clone().requires_grad_()
    (unsharded,) = torch.autograd.grad(sum((leaf**2 * weight).sum() for weight in weights), leaf)
    assert torch.allclose(sum(whole for _, _, whole, _ in results), unsharded, 1e-13, 1e-13)


def _wrong(rank: int, case: str) -> None:
    if case == "indivisible":
        shard_sequence(torch.ones(2, 7))
    elif case == "unequal":
        gather_sequence(torch.ones(2, 7 - rank // 2))
    elif case == "not a member":
        first_two = dist.new_group([0, 1])
        shard_sequence(torch.ones(2, 4), 1, first_two)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("indivisible", IndivisibleSequence, "a sequence of 7 .* cannot be cut into 3"),
        ("unequal", UnequalShards, r"rank 2: \(2, 6\); ranks 0, 1: \(2, 7\)"),
    ],
)
def test_every_rank_raises(pool: Any, case: str, error: type[Exception], message: str) -> None:
    for result in pool.run(_wrong, case, errors=True, seconds=30):
        with pytest.raises(error, match=message):
            raise result


def test_outside_the_group(pool: Any) -> None:
    results = pool.run(_wrong, "not a member", errors=True, seconds=30)
    assert results[:2] == [None, None]
    assert isinstance(results[2], InvalidGroup)


def test_a_rank_that_does_not_gather(fresh_ranks: Any) -> None:
    (result, _) = fresh_ranks(2, timeout_seconds=2).run(_gather_alone, ranks=[0], errors=True, seconds=30)
    assert isinstance(result, RankMissing)


def _gather_alone(rank: int) -> None:
    gather_sequence(torch.ones(2, 3))
