"""Cumulative ops along the sequence: each rank carries on where those before it have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

Call = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]


def _without(y: Tensor, first: int, end: int, fill: float = -torch.inf) -> Tensor:
    """[B, T, D] with rows first .. end - 1 filled."""
    rows = torch.arange(y.shape[1])[:, None]
    return y.masked_fill((rows >= first) & (rows < end), fill)


CALLS: dict[str, Call] = {
    # of y and x: [B, 12, 4], four rows a rank
    "log-sum-exps": lambda y, x: (
        y.logcumsumexp(1),
        (1000 * y).logcumsumexp(1),
        # -inf at the start of a slice, in all of it, and in all that follow
        _without(y, 4, 6).logcumsumexp(1) + _without(y, 4, 8).logcumsumexp(1),
        _without(y, 3, 12).logcumsumexp(1),
    ),
    "products with zeros": lambda y, x: (
        y.cumprod(1),
        _without(y, 5, 6, 0.0).cumprod(1),
        (_without(y, 5, 6, 0.0) * _without(y, 9, 10, 0.0)).cumprod(1),
        x * (3 * x).long().cumprod(1),
    ),
    "extremes": lambda y, x: (
        *y.cummax(1),
        *y.clamp(-0.2, 0.2).cummin(1),
        *_without(y, 0, 9).cummax(1),
        x * (3 * x).long().cummin(1).values + (x > 1).cummax(1)[0],
    ),
    "extremes with NaN": lambda y, x: (
        torch.nan_to_num(_without(y, 5, 6, torch.nan).cummax(1).values),
        (_without(y, 5, 6, torch.nan) + _without(y, 10, 11, torch.nan)).cummin(1).indices,
    ),
    "sums of other types": lambda y, x: (
        y * (x > 0).cumsum(1, dtype=x.dtype),
        y * (10 * x).long().cumsum(1, dtype=x.dtype),
        (100 * x).long().cumsum(1, dtype=torch.int8),
    ),
    "from the end": lambda y, x: (
        y.flip(1).cumsum(1).flip(1) + y.flip(1).mT.cumprod(2).exp().mT.flip(1),
        y.flip(1).cummax(1).values.flip(1) + F.pad(y[:, 1:], (0, 0, 0, 1)).flip(1).logcumsumexp(1).flip(1),
        y.flip(1).detach().cumsum(1).softmax(-1).cumsum(1).flip(1) * y,
    ),
    "longer by some rows": lambda y, x: (
        F.pad(y, (0, 0, 1, 0)).cumsum(1)[:, :-1] * F.pad(y, (0, 0, 5, 0), value=2.0).cumprod(1)[:, 5:],
        F.pad(y, (0, 0, 2, 0), value=3.0).logcumsumexp(1)[:, -x.shape[1] :],
        *(each[:, 3:-2] for each in F.pad(y, (0, 0, 2, 3), value=0.3).cummax(1)),
    ),
    "one of another": lambda y, x: (
        y.sigmoid().cumprod(1).cumsum(1).logcumsumexp(1),
        y.cummax(1).values.cumsum(1)[:, -1] + y.logcumsumexp(1).mean(1),
        torch.utils.checkpoint.checkpoint(lambda z: z.logcumsumexp(1) * z.cumprod(1), y, use_reentrant=False),
    ),
    "other axes": lambda y, x: (
        y.cumprod(2) + y.logcumsumexp(2) + y.cummax(2).values,
        (y[..., None] * x[:, :, None]).cumprod(2).sum(-1),
        (y[..., None] * x[:, :, None]).cumprod(1).sum(-1),
    ),
}


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.call(self.inner(x), x)


def _inputs(length: int, *, first: bool = False) -> Callable[[], Tensor]:
    return lambda: torch.randn((length, 2, 4) if first else (2, length, 4), dtype=torch.float64)


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    call = CALLS[name]
    assert_equivalent(lambda: Model(call), _inputs(12), world_size=3)


@pytest.mark.parametrize(
    ("length", "options"),
    [(3, {}), (12, {"dynamic": True}), (12, {"seq_dim": 0}), (8, {})],
)
def test_lengths_and_layouts(length: int, options: dict[str, Any]) -> None:
    """One token a rank among them, and a slice as long as it has features."""
    dim = options.get("seq_dim", 1)

    def call(y: Tensor, x: Tensor) -> Tensor:
        return y.logcumsumexp(dim) + y.cumprod(dim) * y.cummax(dim).values + y.flip(dim).cumsum(dim).flip(dim)

    world_size = 3 if length % 3 == 0 else 2
    assert_equivalent(lambda: Model(call), _inputs(length, first=dim == 0), world_size=world_size, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    def call(x: Tensor) -> tuple[Tensor, ...]:
        h = x.to(dtype)
        return h.cumprod(1), h.logcumsumexp(1), h.cummax(1).values, h.flip(1).cumsum(1).flip(1)

    def make_inputs() -> Tensor:
        return torch.rand(2, 48, 4) + 0.5

    found = assert_equivalent(lambda: call, make_inputs, world_size=3, dtype=None, backward=False, rtol=5e-3)
    assert {decision["decision"] for decision in found.reports[0]["decisions"]} == {"carry"}


@pytest.mark.parametrize(
    "call",
    [
        # rows of every slice are left out, or put back
        lambda y, x: y[:, 1:].cumprod(1).sum(1),
        lambda y, x: y[:, :-1].cummax(1).values.sum(1),
        lambda y, x: F.pad(y[:, 1:], (0, 0, 1, 0)).logcumsumexp(1),
        # chunks, rows of several sequences, features that begin where rows end
        lambda y, x: y.view(y.shape[0], -1, 2, 4).cumprod(1).view_as(y),
        lambda y, x: y.view(y.shape[0], -1, 2, 4).cummax(2).values.view_as(y),
        lambda y, x: y.flatten(0, 1).cumprod(0).view_as(y),
        lambda y, x: y.flatten(1, 2).cumprod(1).view_as(y),
        # in place
        lambda y, x: (1 * y).cumprod_(1),
        # rows of every slice are left out before they are flipped
        lambda y, x: y[:, 1:].flip(1).cumsum(1).flip(1).sum(1),
    ],
)
def test_others_are_refused(call: Call) -> None:
    assert_refused(lambda: Model(call), _inputs(8), world_size=2, error=UnsupportedOp, match="slice")


class Behind(nn.Module):
    """Rows of its own in front of the sequence, as a state from before would be."""

    def __init__(self, count: int, call: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.rows, self.count, self.call = nn.Parameter(torch.randn(1, count, 4)), count, call

    def forward(self, x: Tensor) -> Tensor:
        first = self.rows.expand(x.shape[0], -1, -1)
        return self.call(torch.cat([first, x], 1), x, self.count)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_in_front_of_the_sequence(count: int) -> None:
    def call(z: Tensor, x: Tensor, count: int) -> Tensor:
        more = z[:, -x.shape[1] :].cumprod(1) * z.cummax(1).values[:, :-count]
        return z.logcumsumexp(1)[:, count:] + z.cumsum(1)[:, count:] + more

    assert_equivalent(lambda: Behind(count, call), _inputs(12), world_size=3)


@pytest.mark.parametrize(
    ("count", "call"),
    [
        (5, lambda z, x, count: z.cumsum(1)[:, count:]),  # more than a rank has of the sequence
        (1, lambda z, x, count: z.cumsum(1)),
        (1, lambda z, x, count: z.sum(1)),
        (1, lambda z, x, count: z.softmax(1)[:, count:]),
        (1, lambda z, x, count: z.flip(1).cumsum(1).flip(1)[:, count:]),
        (1, lambda z, x, count: torch.cat([x, z[:, :1]], 1).cumsum(1)[:, :-1]),
    ],
)
def test_rows_in_front_that_are_refused(count: int, call: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    assert_refused(
        lambda: Behind(count, call), _inputs(8), world_size=2, error=UnsupportedOp, match="slice|sequence"
    )
