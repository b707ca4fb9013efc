"""The flipped sequence against a flip of the whole one: values, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeco_compile.lowering import flips, volume
from zeco_compile.lowering.errors import NeighbourLost
from zeco_compile.lowering.exchange_parts import InvalidExchange
from zeco_compile.lowering.groups import resolve_group

DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "reversed":
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "every other" else x.clone()


def _flipped(rank: int, wholes: list[Tensor], world_size: int) -> list[tuple[Tensor, Tensor | None]]:
    group = resolve_group()
    results = []
    for whole in wholes:
        for dim in (0, 1, -1):
            for layout in ("plain", "reversed", "every other"):
                x = _laid_out(whole.chunk(world_size, dim)[rank], layout)
                x.requires_grad_(x.dtype.is_floating_point)
                y = flips.flip_sequence(x, dim, group)
                assert y.is_contiguous()
                gradient = None
                if x.requires_grad:
                    weight = (whole + 1).chunk(world_size, dim)[rank]
                    (gradient,) = torch.autograd.grad(y, x, _laid_out(weight, layout))
                results.append((y.detach(), gradient))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_dtype_dimension_and_layout(ranks: Any, world_size: int) -> None:
    shape = (world_size, 3 * world_size, 2 * world_size)
    wholes = [(10 * torch.randn(shape, dtype=torch.float64)).to(dtype) for dtype in DTYPES]
    results = ranks(world_size).run(_flipped, wholes, world_size)
    index = 0
    for whole in wholes:
        for dim in (0, 1, -1):
            expected = [each.flip(dim).chunk(world_size, dim) for each in (whole, whole + 1)]
            for _ in range(3):
                for rank in range(world_size):
                    y, gradient = results[rank][index]
                    assert torch.equal(y, expected[0][rank])
                    assert gradient is None or torch.equal(gradient, expected[1][rank])
                index += 1


def _empty(rank: int) -> Tensor:
    return flips.flip_sequence(torch.ones(2, 0, 3), 1, resolve_group())


def test_nothing(ranks: Any) -> None:
    assert [tuple(y.shape) for y in ranks(2).run(_empty)] == [(2, 0, 3)] * 2


def _in_subgroup(rank: int) -> Tensor:
    first, second = dist.new_group([2, 0], sort_ranks=False), dist.new_group([1, 3])
    group = resolve_group(first if rank in (0, 2) else second)
    return flips.flip_sequence(torch.tensor([10 * rank, 10 * rank + 1]), 0, group)


def test_groups_inside_the_world(ranks: Any) -> None:
    found = [y.tolist() for y in ranks(4).run(_in_subgroup)]
    assert found == [[21, 20], [31, 30], [1, 0], [11, 10]]


def _counted(rank: int) -> dict[str, int]:
    x = torch.randn(2, 8, 3, requires_grad=True)
    volume.reset()
    flips.flip_sequence(x, 1, resolve_group()).sum().backward()
    return volume.sent()


def test_each_sends_its_slice_but_the_one_in_the_middle(ranks: Any) -> None:
    sent = [counts.get("flip", 0) for counts in ranks(3).run(_counted)]
    assert sent == [2 * 2 * 8 * 3 * 4, 0, 2 * 2 * 8 * 3 * 4]  # forward and backward


def _opcheck(rank: int) -> None:
    group = resolve_group()
    x = torch.randn(2, 4, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    for value in (x, torch.arange(8).view(2, 4)):
        torch.library.opcheck(torch.ops.zeco.flip_sequence.default, (value, 1, group))


@pytest.mark.parametrize("world_size", [1, 2])
def test_opcheck(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(_opcheck)


def _compiled(rank: int, lengths: list[int]) -> tuple[float, int]:
    import torch._dynamo.utils

    group = resolve_group()

    def turned(x: Tensor) -> Tensor:
        return flips.flip_sequence(x.sin(), 1, group) * x

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, worst = torch.compile(turned, backend="aot_eager", fullgraph=True, dynamic=True), 0.0
    for length in lengths:
        x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        gradients = [torch.autograd.grad(run(x).sum(), x)[0] for run in (turned, compiled)]
        worst = max(worst, (gradients[0] - gradients[1]).abs().max().item())
    return worst, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_with_a_symbolic_length(ranks: Any) -> None:
    for worst, graphs in ranks(3).run(_compiled, [6, 3, 11]):
        assert worst < 1e-12
        assert graphs == 1


def test_a_dimension_that_is_not_there() -> None:
    with pytest.raises(InvalidExchange, match="dimension 2 of a tensor with 2 dimensions"):
        flips.flip_sequence(torch.ones(2, 3), 2, "")


def _lonely(rank: int) -> Exception | None:
    try:
        flips.flip_sequence(torch.ones(2, 4), 1, resolve_group())
    except NeighbourLost as error:
        return error
    return None


def test_the_opposite_rank_never_comes(fresh_ranks: Any) -> None:
    pool = fresh_ranks(3, 3)
    assert pool.run(_lonely) == [None, None, None]
    error = pool.run(_lonely, ranks=[0], seconds=60)[0]
    assert isinstance(error, NeighbourLost)
    assert error.neighbour == 2
