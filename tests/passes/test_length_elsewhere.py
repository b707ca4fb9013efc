"""A number from the length that is used anywhere but along the sequence is refused. A few rows at an end may leave."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeco_compile.testing import assert_equivalent, assert_refused

Use = Callable[["Model", Tensor, int], Tensor]


class Model(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.a, self.use = nn.Parameter(torch.rand(8, 4)), use
        self.register_buffer("table", torch.rand(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x, x.shape[1])


def _loop(m: Model, x: Tensor) -> Tensor:
    h, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


def _written(m, x, T):
    t = torch.zeros(8, 4, dtype=x.dtype)
    t[:4] = x[0, :4]
    return x * t[0]


def _copied(m, x, T):
    t = m.a.clone()
    t[:4].copy_(x[0, :4])
    return x * t.sum(0)


def _into_a_buffer(m, x, T):
    m.table[:2] = x.detach()[0, -2:]
    return x * 2


def _by_length_into_a_buffer(m, x, T):
    m.table[: T // 4] = x.detach()[0, : T // 4]
    return x * 2


ELSEWHERE: dict[str, Use] = {
    "a row": lambda m, x, T: x * m.a[T // 4],
    "a row from the end": lambda m, x, T: x + m.a[-(T // 4)],
    "narrow": lambda m, x, T: x + m.a.narrow(0, T // 8, 1),
    "a diagonal": lambda m, x, T: x @ m.a[:4].tril(T - 6),
    "features": lambda m, x, T: x * x[..., T // 8 : T // 8 + 1],
    "a feature, bounded": lambda m, x, T: x * x[..., min(T // 8, 3)].unsqueeze(-1),
    "in a checkpoint": lambda m, x, T: checkpoint(lambda y: y + m.a[y.shape[1] // 4], x, use_reentrant=False),
    "a row beside a loop": lambda m, x, T: _loop(m, x) * m.a[T // 4],
    "rows beside a loop": lambda m, x, T: _loop(m, x) + m.a[: T // 4].sum(0),
    "rows by the length into a buffer": _by_length_into_a_buffer,
}


ROWS_AT_AN_END: dict[str, Use] = {
    "written beside a loop": lambda m, x, T: _loop(m, x) * _written(m, x, T),
    "copied beside a loop": lambda m, x, T: _loop(m, x) * _copied(m, x, T),
    "into a buffer beside a loop": lambda m, x, T: _loop(m, x) * _into_a_buffer(m, x, T) + m.table[1],
}


@pytest.mark.parametrize("name", ROWS_AT_AN_END)
def test_rows_at_an_end_leave_it(name: str) -> None:
    use = ROWS_AT_AN_END[name]
    assert_equivalent(lambda: Model(use), lambda: torch.randn(2, 16, 4), world_size=2)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_refused(name: str) -> None:
    use = ELSEWHERE[name]
    assert_refused(
        lambda: Model(use),
        lambda: torch.randn(2, 16, 4),
        world_size=2,
        match=r"(?s)test_length_elsewhere\.py",
    )


FINE: dict[str, Use] = {
    "rows": lambda m, x, T: x + m.a[: T // 4].sum(0),
    "copies": lambda m, x, T: x + m.a[:1].repeat(T // 4, 1).sum(0),
    "padding": lambda m, x, T: x + F.pad(m.a, (0, 0, 0, T // 4), value=1.0).sum(0),
    "a table cut to the length": lambda m, x, T: x + m.table[:T],
    "constant rows beside a loop": lambda m, x, T: _loop(m, x) * m.a[3] + m.a[:2].sum(0),
    "a constant feature": lambda m, x, T: x * x[..., 1:2],
} | {f.__name__.strip("_").replace("_", " "): f for f in (_written, _copied, _into_a_buffer)}


@pytest.mark.parametrize("name", FINE)
def test_equal(name: str) -> None:
    use = FINE[name]
    assert_equivalent(lambda: Model(use), lambda: torch.randn(2, 16, 4), world_size=2)


def test_a_threshold_that_only_the_whole_sequence_passes() -> None:
    def use(m: Model, x: Tensor, T: int) -> Tensor:
        return x * (2 if T > 100 else 1) + 0 * int(math.log(T))

    assert_refused(
        lambda: Model(use), lambda: torch.randn(2, 132, 4), world_size=3, match=r"test_length_elsewhere\.py"
    )
