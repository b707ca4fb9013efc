"""Softmax attention beside a loop over the sequence, which makes the length a constant in the trace.

Eight tokens per rank and heads, features, windows and tables of eight: nothing is to be told by its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.testing import assert_equivalent, assert_refused

Attend = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A recurrence, then `attend(model, q, k, v)` with heads of eight features, each [B, H, T, D]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(8, 24), attend
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64).bool())
        self.bias = nn.Embedding(64, 1)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        h, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            outputs.append(h)
        y = torch.stack(outputs, 1)
        self.documents = documents
        q, k, v = (t.unflatten(-1, (1, 8)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        return x + self.attend(self, q, k, v).transpose(1, 2).flatten(2)


def _masked(mask: Callable[[Tensor, Tensor, int], Tensor]) -> Attend:
    """Scaled dot product attention with a mask of the numbers of queries and keys, and the length."""

    def attend(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        seen = mask(i[:, None], i[None, :], q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])

    return attend


def _written_out(m, q, k, v):
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT / 8**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def _mask_in_a_buffer(m, q, k, v):
    T = q.shape[2]
    return (q @ k.mT).masked_fill(~m.mask[:, :, :T, :T], -1e9).softmax(-1) @ v


def _learned_bias(m, q, k, v):
    i = torch.arange(q.shape[2])
    distance = (i[:, None] - i).clamp(0, 8)
    scores = q @ k.mT + m.bias(distance).permute(2, 0, 1)
    return scores.masked_fill(i > i[:, None], float("-inf")).softmax(-1) @ v


def _packed(m, q, k, v):
    """Documents by their positions, as transformers finds them: a new one begins where they do not go on."""
    positions = torch.arange(q.shape[2]).expand(2, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    document = (steps != 1).cumsum(-1)
    i, batch = torch.arange(q.shape[2]), torch.arange(2)[:, None, None]
    seen = (document[batch, i[:, None]] == document[batch, i]) & (i <= i[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def _documents(m, q, k, v):
    seen = m.documents[:, None, :, None] == m.documents[:, None, None, :]
    T = q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen & torch.ones(T, T, dtype=torch.bool).tril())


EQUAL: dict[str, Attend] = {
    "a window of half the sequence": _masked(lambda i, j, T: (i >= j) & (j > i - T // 2)),
    "the last keys": _masked(lambda i, j, T: (i >= j) | (j >= T - 2)),
    "scores over the length": lambda m, q, k, v: (q @ k.mT / math.sqrt(q.shape[2])).softmax(-1) @ v,
    "causal": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "a mask": _masked(lambda i, j, T: i >= j),
    "a window as wide as the slice": _masked(lambda i, j, T: (i >= j) & (j > i - 8)),
    "from the eighth on": _masked(lambda i, j, T: (j >= 8) | (i >= j)),
    "written out": _written_out,
    "a mask in a buffer": _mask_in_a_buffer,
    "a learned bias": _learned_bias,
    "packed": _packed,
    "the last column of scores": lambda m, q, k, v: (q @ k.mT).softmax(-1)[..., q.shape[2] - 1 :] * v,
}

FROM_THE_LENGTH: dict[str, Attend] = {
    "a triangle": _masked(lambda i, j, T: torch.ones(T, T, dtype=torch.bool).tril(T // 4)),
    "a row of the bias": lambda m, q, k, v: (q @ k.mT * m.bias.weight[q.shape[2]]).softmax(-1) @ v,
    "a mask's sum": lambda m, q, k, v: (
        (q @ k.mT).softmax(-1) @ v / torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril().sum()
    ),
    "a mask for the slice": lambda m, q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=m.mask if q.shape[2] == 64 else None, is_causal=q.shape[2] < 16
    ),
}


def _inputs() -> Tensor:
    return torch.randn(2, 16, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", EQUAL)
def test_masks(name: str) -> None:
    found = assert_equivalent(lambda: Model(EQUAL[name]), _inputs, world_size=2)
    assert len(found.decisions("gathered keys")) == 1


def test_documents_given_as_an_input() -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        return _inputs(), torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 2 + [2] * 5])

    assert_equivalent(lambda: Model(_documents), inputs, world_size=2)


@pytest.mark.parametrize("name", FROM_THE_LENGTH)
def test_a_number_from_the_length_is_refused(name: str) -> None:
    assert_refused(lambda: Model(FROM_THE_LENGTH[name]), _inputs, world_size=2)


def test_more_ranks() -> None:
    assert_equivalent(
        lambda: Model(EQUAL["a window as wide as the slice"]),
        lambda: torch.randn(2, 12, 8, dtype=torch.float64),
        world_size=4,
    )
