"""Running maxima of all ranks against the loop over the whole sequence: values, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zeco_compile.lowering import maxima
from zeco_compile.lowering.groups import resolve_group


def _in_steps(g: Tensor, k: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    m, out = initial, [initial]
    for t in range(k.shape[0]):
        m = torch.maximum(m + g[t], k[t])
        out.append(m)
    return torch.stack(out[1:]), torch.stack(out[:-1])


def _gradients(made: tuple[Tensor, Tensor], weights: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    made[0].mul(weights[0]).add(made[1] * weights[1]).sum().backward()
    return [leaf.grad for leaf in leaves]  # type: ignore[misc]


def _case(kind: str, length: int) -> tuple[list[Tensor], Tensor]:
    """([g, k, initial], weights of both results)."""
    generator = torch.Generator().manual_seed(length)
    g = -torch.rand(length, 2, 3, generator=generator, dtype=torch.float64)
    k = 2 * torch.randn(length, 2, 3, generator=generator, dtype=torch.float64)
    initial = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    if kind == "ties":
        g, k, initial = g.round(), k.round(), initial.round()
    if kind == "all equal":
        g, k, initial = g * 0, k * 0, initial * 0
    if kind == "forgets":
        g[length // 2], g[-1], initial = -torch.inf, -1e38, torch.full_like(initial, -1e38)
    if kind == "the first rank's":
        k = k - 50
    return [g, k, initial], torch.randn(2, length, 2, 3, generator=generator, dtype=torch.float64)


def _on_rank(rank: int, cases: list[tuple[list[Tensor], Tensor]], world_size: int) -> list[list[Tensor]]:
    results = []
    for (g, k, initial), weights in cases:
        leaves = [g.chunk(world_size)[rank], k.chunk(world_size)[rank], initial]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        made = maxima.running_maximum(*leaves, resolve_group(), world_size)
        found = _gradients(made, weights.chunk(world_size, 1)[rank], leaves)
        results.append([*(each.detach() for each in made), *found])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_loop(ranks: Any, world_size: int) -> None:
    kinds = ("ordinary", "ties", "all equal", "forgets", "the first rank's")
    named = [(kind, length * world_size) for kind in kinds for length in (1, 2, 5)]
    cases = [_case(*each) for each in named]
    results = ranks(world_size).run(_on_rank, cases, world_size)
    for index, (given, weights) in enumerate(cases):
        leaves = [each.clone().requires_grad_() for each in given]
        made = _in_steps(*leaves)
        expected = [*(each.detach() for each in made), *_gradients(made, weights, leaves)]
        found = [each[index] for each in results]
        whole = [torch.cat([each[place] for each in found]) for place in range(4)]
        for one, other in zip([*whole, sum(each[4] for each in found)], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"{named[index]}")


def test_long_and_narrow() -> None:
    """Sums of g that float32 could not subtract from each other."""
    g, k = torch.full((4096, 1), -1e4), torch.linspace(-3, 3, 4096)[:, None]
    m, before = maxima.running_maximum(g, k, torch.zeros(1), "", 1)
    assert torch.equal(m, k)
    assert torch.equal(before[1:], m[:-1])


@pytest.mark.parametrize("layout", ["batch first", "features first", "expanded"])
def test_opcheck(layout: str) -> None:
    """Shapes and strides as the fakes say, whatever the strides of what comes in."""
    (g, k, initial), (dm, dbefore) = _case("ordinary", 4)
    if layout == "batch first":
        g, k, dm = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (g, k, dm))
    elif layout == "features first":
        g, k, dbefore = (x.movedim(2, 0).contiguous().movedim(0, 2) for x in (g, k, dbefore))
    else:
        g, dm = g[:, :1, :1].expand_as(k), dm[:1, :1, :1].expand_as(k)
    torch.library.opcheck(maxima.running_maximum, (g, k, initial, "", 1))
    before = maxima.running_maximum(g, k, initial, "", 1)[1]
    torch.library.opcheck(maxima.running_maximum_backward, (dm, dbefore, g, k, before, "", 1))
