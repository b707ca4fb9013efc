"""Attention that is neither linear nor a softmax: a rank's queries meet the keys of all ranks there, too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import LengthInValue, UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """`attend(q, k, v)` with one head of four features, each [B, T, D]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(4, 12), nn.Linear(4, 4), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(*self.qkv(x).chunk(3, -1)))


def _later(q: Tensor) -> Tensor:
    return torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)


def _gau(q, k, v):
    scores = F.relu(q @ k.mT / q.shape[1]) ** 2
    return scores.masked_fill(_later(q), 0.0) @ v


def _top(q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], float("-inf")).softmax(-1) @ v


def _softmax_by_hand(q, k, v):
    scores = (q @ k.mT).masked_fill(_later(q), -1e9)
    scores = (scores - scores.max(-1, keepdim=True)[0]).exp()
    return scores / scores.sum(-1, keepdim=True) @ v


def _detached(q, k, v):
    scores = (q @ k.mT).relu().tril()
    return scores / (scores.detach().sum(-1, keepdim=True) + 1) @ v


def _position_over_length(q, k, v):
    i = torch.arange(q.shape[1]) / q.shape[1]
    return ((q @ k.mT).sigmoid() * (i[:, None] - i).relu()) @ v


def _before_linear(q, k, v):
    return (q @ _gau(q, k, v).mT).tril() @ v


ATTENTION: dict[str, Attend] = {
    "gated attention unit": _gau,
    "sigmoid, leaky mask": lambda q, k, v: (
        (q @ k.mT - 2).sigmoid().masked_fill(_later(q).roll(1, 1), 0.0) @ v
    ),
    "laplace": lambda q, k, v: (1 + torch.erf((q @ k.mT - 0.7) / 0.28)).tril() @ v,
    "anticausal": lambda q, k, v: (q @ k.mT).relu().triu() @ v,
    "cosine": lambda q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).exp().tril() @ v,
    "running sum over the keys": lambda q, k, v: (q @ k.mT).relu().cumsum(-1) @ v,
    "twice": lambda q, k, v: (s := (q @ k.mT).relu().tril()) @ (s @ v),
    "the largest scores": _top,
    "softmax by hand": _softmax_by_hand,
    "detached normaliser": _detached,
    "position over length": _position_over_length,
    "before linear attention": _before_linear,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    attend = ATTENTION[name]
    found = assert_equivalent(
        lambda: Model(attend), lambda: torch.randn(2, 8, 4, dtype=torch.float64), world_size=2
    )
    assert any(d["decision"] == "gathered keys" for d in found.reports[0]["decisions"])


def test_three_ranks() -> None:
    assert_equivalent(lambda: Model(_gau), lambda: torch.randn(2, 12, 4, dtype=torch.float64), world_size=3)


def test_keys_are_gathered_once() -> None:
    found = assert_equivalent(
        lambda: Model(_softmax_by_hand), lambda: torch.randn(2, 8, 4, dtype=torch.float64), world_size=2
    )
    assert found.regions == []


def _threshold_of_queries(q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.topk(2, -2).values[..., -1:, :], 0.0) @ v


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: (q @ k.mT).exp().softmax(1) @ v,  # over the queries, which are on other ranks
        lambda q, k, v: (s := (q @ k.mT).relu()) / (s.sum(1, keepdim=True) + 1) @ v,
        lambda q, k, v: (q @ k.mT).relu().cumsum(1) @ v,
        lambda q, k, v: (q @ k.mT).relu().roll(1, 1) @ v,
        lambda q, k, v: ((s := (q @ k.mT).relu()) + s.mT) @ v,
        _threshold_of_queries,  # of other rounding, if it were gathered
        lambda q, k, v: (q @ k.mT).relu().flatten(1).softmax(-1).view(2, q.shape[1], -1) @ v,
        lambda q, k, v: F.dropout((q @ k.mT).relu(), 0.5) @ v,
        lambda q, k, v: (q @ k.mT) @ v,  # linear, and not causal
        lambda q, k, v: ((q @ k.mT).tril() - (q @ k.mT).tril(-3)) @ v,
    ],
)
def test_what_needs_other_queries_or_is_linear_is_refused(attend: Attend) -> None:
    assert_refused(
        lambda: Model(attend),
        lambda: torch.randn(2, 8, 4, dtype=torch.float64),
        world_size=2,
        error=UnsupportedOp,
        match="test_gathered_keys_nonlinear",
    )


def test_a_function_of_the_length_in_the_scores() -> None:
    """It makes the length a constant in the trace; the number is that of the whole sequence."""
    assert_equivalent(
        lambda: Model(lambda q, k, v: (q @ k.mT / 4 - math.log(q.shape[1])).sigmoid().tril() @ v),
        lambda: torch.randn(2, 8, 4, dtype=torch.float64),
        world_size=2,
    )


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: (q @ k.mT - math.log(q.shape[1])).sigmoid().tril(int(math.log2(q.shape[1]))) @ v,
        lambda q, k, v: (q * math.log(q.shape[1]) @ k.mT).sigmoid() @ v,  # not of the scores
    ],
)
def test_a_function_of_the_length_elsewhere(attend: Attend) -> None:
    assert_refused(
        lambda: Model(attend),
        lambda: torch.randn(2, 16, 4, dtype=torch.float64),
        world_size=2,
        error=LengthInValue,
        match="test_gathered_keys_nonlinear",
    )
