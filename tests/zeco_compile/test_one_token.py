"""One token per rank: as with more, or refused; a trace of one token by itself would take many of these for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile import gated_linear_attention
from zeco_compile.passes.errors import CompileError, LengthInValue
from zeco_compile.testing import assert_equivalent, assert_refused

Body = Callable[["Parts", Tensor], Any]


class Parts(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.project = nn.Linear(6, 18)
        self.conv = nn.Conv1d(6, 6, 4, groups=6)
        self.table = nn.Parameter(torch.randn(32, 6))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x).unflatten(-1, (3, 2, 3)).unbind(2)


def by_name(m: Parts, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return gated_linear_attention(q, k, v, -F.softplus(k)).flatten(2)


def quadratic(m: Parts, x: Tensor) -> Tensor:
    q, k, v = m.project(x).chunk(3, -1)
    return (q @ k.mT).tril() @ v


def softmax(m: Parts, x: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in m.heads(x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def convolution(m: Parts, x: Tensor) -> Tensor:
    return m.conv(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)


def token_shift(m: Parts, x: Tensor) -> Tensor:
    return m.project(torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1))


EQUAL: dict[str, tuple[Body, list[str]]] = {
    "by name": (by_name, ["per channel"]),
    "quadratic": (quadratic, ["none"]),
    "running sum": (lambda m, x: m.project(x).cumsum(1), ["none"]),
    "softmax attention": (softmax, []),
    "convolution": (convolution, []),
    "token shift": (token_shift, []),
    "table, one row each": (lambda m, x: x + m.table[: x.shape[1]], []),
    "table, its first row": (lambda m, x: x + m.table[:1], []),
    "table split": (lambda m, x: x + m.table.split([x.shape[1], 32 - x.shape[1]])[0], []),
    "last row": (lambda m, x: m.project(x)[:, -1], []),
    "mean": (lambda m, x: m.project(x).mean(1), []),
    "divided by the length": (lambda m, x: x / x.shape[1], []),
    "second half": (lambda m, x: x * (torch.arange(x.shape[1]) >= x.shape[1] // 2)[:, None], []),
    "counted down": (lambda m, x: x * torch.arange(x.shape[1], 0, -1, dtype=x.dtype)[:, None], []),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name: str) -> None:
    body, families = EQUAL[name]
    found = assert_equivalent(lambda: Parts(body), lambda: torch.randn(2, 3, 6), world_size=3)
    assert [region["family"] for region in found.regions] == families
    assert found.reports[0]["length"] == "1"


def backwards(m: Parts, x: Tensor) -> Tensor:
    a, b, _ = m.project(x).sigmoid().chunk(3, -1)
    h, out = torch.zeros_like(a[:, 0]), []
    for t in reversed(range(x.shape[1])):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out[::-1], 1)


def last_query(m: Parts, x: Tensor) -> Tensor:
    q, k, _ = m.project(x).chunk(3, -1)
    h, out = torch.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + k[:, t]
        out.append(h * q[:, -1])
    return torch.stack(out, 1)


REFUSED: dict[str, Body] = {
    "backwards": backwards,
    "last query": last_query,
    "function of the length": lambda m, x: x * math.log(x.shape[1] + 1),
    "numbers of a list": lambda m, x: x * torch.tensor([1 / (i + 1) for i in range(x.shape[1])]).to(x)[:, None],
    "rolled by more than there are": lambda m, x: x.roll(4, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body = REFUSED[name]
    assert_refused(lambda: Parts(body), lambda: torch.randn(2, 3, 6), world_size=3, error=CompileError)


def test_a_loop_says_what_to_do() -> None:
    (message, *_) = assert_refused(
        lambda: Parts(backwards), lambda: torch.randn(2, 2, 6), world_size=2, error=LengthInValue
    )
    assert "give each rank at least two tokens" in message
    assert "test_one_token.py" in message
