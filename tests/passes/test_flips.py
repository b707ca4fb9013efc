"""The sequence turned around: slices are exchanged with the opposite rank, and what is between two flips is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

Call = Callable[["Model", Tensor], Tensor | tuple[Tensor, ...]]


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.inner, self.gate, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(7, 4)
        self.call = call

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.call(self, x)


def _inputs(length: int = 12) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, 4, dtype=torch.float64)


def _steps(m: Model, x: Tensor) -> Tensor:
    decay, update = torch.sigmoid(m.gate(x)), m.inner(x)
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + update[:, t]
        out.append(h)
    return torch.stack(out, 1)


def _written(m: Model, x: Tensor) -> Tensor:
    y = m.inner(x) * 1
    z = y.flip(1)
    y.mul_(2)
    z[:, 0] = 0
    return y * z


def _by_heads(m: Model, x: Tensor) -> Tensor:
    """A flip keeps the order in memory, which the view at the end relies on."""
    heads = m.inner(x).view(2, -1, 2, 2).transpose(1, 2)
    return torch.flip(heads, (-2, -1)).transpose(1, 2).view(2, -1, 4)


def _loss(m: Model, x: Tensor) -> Tensor:
    """Each token from those behind it."""
    y = x.flip(1)
    tokens = (10 * y[..., 0]).long() % 7
    return F.cross_entropy(m.table(tokens)[:, :-1].flatten(0, 1).repeat(1, 2), tokens[:, 1:].flatten())


CALLS: dict[str, Call] = {
    "by itself": lambda m, x: (m.inner(x).flip(1) + x, torch.fliplr(x) * m.inner(x), (x > 0).flip(1)),
    "other dimensions": lambda m, x: (
        m.inner(x).flip(0, -1, 1) + m.inner(x).flip(0) + torch.flip(x, dims=(2, -2))
    ),
    "written to": _written,
    "order in memory": _by_heads,
    "positions": lambda m, x: m.inner(x) * torch.arange(x.shape[1]).flip(0)[:, None],
    "token ids": lambda m, x: m.table(((10 * x[..., 0]).long() % 7).flip(1)) * x,
    "attention": lambda m, x: F.scaled_dot_product_attention(
        *3 * (m.inner(x).flip(1)[:, None],), is_causal=True
    ),
    "loss": _loss,
    "checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(
        lambda z: m.inner(z.flip(1)).tanh().flip(1), x, use_reentrant=False
    ),
    "sums beside what they are of": lambda m, x: (z := m.inner(x).flip(1)).cumsum(1).flip(1) + z,
    "sums left as they are": lambda m, x: (
        m.inner(x).flip(1).cumsum(1),
        m.inner(x).flip(1, 2).cumsum(1).flip(1, 2),
    ),
    "sums of more": lambda m, x: ((m.inner(x).flip(1) + x).cumsum(1).flip(1), (x.flip(1) * 2).flip(1)),
    "averages": lambda m, x: (m.inner(x).flip(1).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]).flip(
        1
    ),
    "shifted": lambda m, x: F.pad(m.inner(x).flip(1).cumsum(1), (0, 0, 1, 0))[:, :-1].flip(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    assert_equivalent(lambda: Model(CALLS[name]), _inputs(), world_size=3)


@pytest.mark.parametrize(
    ("world_size", "length", "options"), [(2, 8, {"dynamic": True}), (4, 8, {}), (3, 3, {})]
)
def test_ranks_and_lengths(world_size: int, length: int, options: dict[str, Any]) -> None:
    """One token a rank among them, and a slice as long as it has features."""

    def call(m: Model, x: Tensor) -> Tensor:
        return m.inner(x.flip(1)).cumsum(1).flip(1) * m.gate(x).flip(1)

    assert_equivalent(lambda: Model(call), _inputs(length), world_size=world_size, **options)


def test_both_directions_report_what_they_send() -> None:
    found = assert_equivalent(
        lambda: Model(lambda m, x: _steps(m, x) + _steps(m, x.flip(1)).flip(1)), _inputs(8), world_size=2
    )
    assert [each["family"] for each in found.regions] == ["per head and token"] * 2
    (report, *_) = found.reports
    assert [each["decision"] for each in report["decisions"]].count("flip") == 2
    sent = [each for each in report["communication"] if each["direction"] == "to the opposite rank"]
    assert [(each["bytes_per_call"], each["calls"]) for each in sent] == [(2 * 4 * 4 * 8, 2)] * 2


@pytest.mark.parametrize(
    "call",
    [
        # not all rows of the slices, or more; rows of several sequences, and chunks
        lambda m, x: m.inner(x)[:, 1:].flip(1),
        lambda m, x: F.pad(m.inner(x), (0, 0, 1, 0)).flip(1)[:, 1:],
        lambda m, x: m.inner(x).flatten(0, 1).flip(0).view_as(x),
        lambda m, x: m.inner(x).view(2, -1, 2, 4).flip(1).view_as(x),
        # of values that are not known to be right
        lambda m, x: m.inner(x).sort(1)[0].flip(1),
    ],
)
def test_others_are_refused(call: Call) -> None:
    assert_refused(lambda: Model(call), _inputs(8), world_size=2, error=UnsupportedOp, match="slice")
