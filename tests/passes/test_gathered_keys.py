"""Softmax attention: whatever way it is written, a rank's queries meet the keys of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

Attend = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two heads of four features around `attend(model, q, k, v)`, each [B, H, T, D]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(8, 24), nn.Linear(8, 8), attend
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64).bool())
        self.bias = nn.Embedding(64, 2)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        self.keep = keep
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


def _sdpa_masked(m, q, k, v):
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _sdpa_window(m, q, k, v):
    i = torch.arange(q.shape[2])
    distance = i[:, None] - i[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 3))


def _sdpa_documents(m, q, k, v):
    """Which document a token is in is counted over the sequence."""
    i = torch.arange(q.shape[2])
    document = (i % 3 == 0).cumsum(0)
    mask = (document[:, None] == document) & (i[:, None] >= i)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _added_mask(m, q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
    return (scores + mask).softmax(-1) @ v


def _mask_in_a_buffer(m, q, k, v):
    T = q.shape[2]
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return F.softmax(scores.masked_fill(~m.mask[:, :, :T, :T], float("-inf")), dim=-1) @ v


def _linear_bias(m, q, k, v):
    i = torch.arange(q.shape[2], dtype=q.dtype)
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) - (i[:, None] - i).abs() * slopes
    scores = scores.masked_fill(i[None] > i[:, None], -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def _learned_bias(m, q, k, v):
    i = torch.arange(q.shape[2])
    distance = (i[:, None] - i).clamp(0, 63)
    scores = q @ k.mT + m.bias(distance).permute(2, 0, 1)
    return scores.masked_fill(i > i[:, None], float("-inf")).softmax(-1) @ v


def _length_times_the_weights(m, q, k, v):
    """Beside `_bias_by_offset` and `_fractions`: a number from the length is made global once, and not again here."""
    return ((q @ k.mT).softmax(-1) * q.shape[2]) @ v


def _bias_by_offset(m, q, k, v):
    T = q.shape[2]
    i = torch.arange(T)
    offset = (i[:, None] - i) + T - 1
    return (q @ k.mT + m.bias(offset).permute(2, 0, 1)).softmax(-1) @ v


def _fractions(m, q, k, v):
    i = torch.arange(q.shape[2], dtype=q.dtype) / q.shape[2]
    return (q @ k.mT - (i[:, None] - i).abs()).softmax(-1) @ v


def _positions_cut_from_more(m, q, k, v):
    """Positions that are rows of a longer range: what is made is as long as no slice is."""
    T = q.shape[2]
    i, j = torch.arange(T + 3)[2:-1], torch.arange(2 * T)[T:] - T + 2
    return (q @ k.mT - (i[:, None] - j).abs() * 0.1 + torch.arange(T + 1)[1:] * 0.1).softmax(-1) @ v


def _positions_behind_the_first(m, q, k, v):
    i = F.pad(torch.arange(1, q.shape[2]), (1, 0))
    return (q @ k.mT - (i[:, None] - i).abs() * 0.1).softmax(-1) @ v


def _table_of_distances(m, q, k, v):
    """A learned bias for each of the 2T - 1 distances, looked up for each pair."""
    T = q.shape[2]
    distances = (torch.arange(2 * T - 1) - (T - 1)).clamp(-31, 31)
    i = torch.arange(T)
    table = m.bias(distances + 31)
    return (q @ k.mT + table[i[:, None] - i + T - 1].permute(2, 0, 1)).softmax(-1) @ v


def _keys_first(m, q, k, v):
    scores = k @ q.mT
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
    return scores.where(seen, -1e30).softmax(-2).mT @ v


def _grouped(m, q, k, v):
    k, v = (t[:, :1].expand(-1, 2, -1, -1).reshape(q.shape) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _padding(m, q, k, v):
    T = q.shape[2]
    mask = torch.ones(T, T, dtype=torch.bool).tril() & m.keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _before_linear_attention(m, q, k, v):
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y + (y @ k.mT).tril() @ v


ATTENTION: dict[str, Attend] = {
    "causal": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "values in another order": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v.flip(2), is_causal=True),
    "full": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "grouped by the op": lambda m, q, k, v: F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
    ),
    "not causal, written out": lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v,
} | {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        _sdpa_masked, _sdpa_window, _sdpa_documents, _added_mask, _mask_in_a_buffer, _linear_bias, _learned_bias,
        _keys_first, _grouped, _length_times_the_weights, _bias_by_offset, _fractions,
        _positions_cut_from_more, _positions_behind_the_first, _table_of_distances,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    attend = ATTENTION[name]
    found = assert_equivalent(
        lambda: Model(attend), lambda: torch.randn(2, 8, 8, dtype=torch.float64), world_size=2
    )
    (decision,) = [d for d in found.reports[0]["decisions"] if d["decision"] == "gathered keys"]
    assert "against the 2 value(s) of all ranks" in decision["detail"], "keys and values, and no masks"
    gathers = [c for c in found.reports[0]["communication"] if "gathered keys" in c["what"]]
    heads = 1 if "grouped" in name else 2
    assert [c["bytes_per_call"] for c in gathers] == [2 * heads * 4 * 4 * 8] * 2


@pytest.mark.parametrize("name", ["causal", "mask in a buffer", "sdpa documents"])
def test_more_ranks(name: str) -> None:
    attend = ATTENTION[name]
    assert_equivalent(lambda: Model(attend), lambda: torch.randn(2, 12, 8, dtype=torch.float64), world_size=4)


def test_one_token_per_rank_with_a_causal_op() -> None:
    attend = ATTENTION["causal"]
    assert_equivalent(lambda: Model(attend), lambda: torch.randn(2, 3, 8, dtype=torch.float64), world_size=3)


def test_a_mask_given_as_an_input() -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        keep = torch.ones(2, 8, dtype=torch.bool)
        keep[0, 5:] = False
        return torch.randn(2, 8, 8, dtype=torch.float64), keep

    assert_equivalent(lambda: Model(_padding), inputs, world_size=2)


def test_linear_attention_behind_it_is_recognised() -> None:
    found = assert_equivalent(
        lambda: Model(_before_linear_attention),
        lambda: torch.randn(2, 8, 8, dtype=torch.float64),
        world_size=2,
    )
    assert [region["family"] for region in found.regions] == ["none"]


@pytest.mark.parametrize(
    "attend",
    [
        lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v,  # over the queries, which are on other ranks
        lambda m, q, k, v: (q @ k.mT).cumsum(-2).softmax(-1) @ v,
        lambda m, q, k, v: (q @ k.mT).softmax(-1).mT @ v,
        lambda m, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v,
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k[..., :-1, :], v[..., :-1, :]),
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k[..., 1:, :], v[..., :-1, :], is_causal=True),
        lambda m, q, k, v: F.pad(
            F.scaled_dot_product_attention(q[..., 1:, :], k[..., :-1, :], v[..., :-1, :], is_causal=True),
            (0, 0, 1, 0),
        ),
        lambda m, q, k, v: (q @ k[..., :-1, :].mT).softmax(-1) @ v[..., :-1, :],
        lambda m, q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(q.shape[-2] + 1, q.shape[-2] + 1, dtype=torch.bool).tril()[1:, :-1]
        ),
    ],
)
def test_what_needs_other_queries_or_some_keys_alone_is_refused(attend: Attend) -> None:
    assert_refused(
        lambda: Model(attend),
        lambda: torch.randn(2, 8, 8, dtype=torch.float64),
        world_size=2,
        error=UnsupportedOp,
        match="sequence",
    )
