"""The chunk layout and the sums along it."""

from __future__ import annotations

import pytest
import torch

from zeco_compile.kernels.chunks import (
    RESET,
    Chunking,
    decay_of,
    finite_log_gate,
    sum_after,
    sum_before,
    sum_from,
    sum_to,
)
from zeco_compile.kernels.shapes import Sizes

LENGTHS = [1, 2, 3, 31, 32, 33, 64, 75]


def chunking(tokens):
    return Chunking.of(Sizes(2, tokens, 3, 4, 4, 4), torch.device("cpu"))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_split_and_join_are_inverse_and_fill_with_zeros(tokens):
    cut = chunking(tokens)
    x = torch.randn(2, 3, tokens, 4).transpose(1, 2)
    rows = cut.split(x, torch.float64)
    assert rows.shape == (cut.count * 6, cut.chunk, 4)
    assert torch.equal(cut.join(rows), x.double())
    assert rows.sum().item() == pytest.approx(x.double().sum().item())
    assert torch.equal(rows.view(cut.count, 2, 3, cut.chunk, 4)[0, 1, 2, 0], x[1, 0, 2].double())


@pytest.mark.parametrize("tokens", LENGTHS)
def test_running_sums(tokens):
    cut = chunking(tokens)
    x = torch.randn(2, tokens, 3, 4, dtype=torch.float64)
    total = x.sum(1, keepdim=True)
    inclusive = x.cumsum(1)
    wanted = {
        sum_to: inclusive,
        sum_before: inclusive - x,
        sum_from: total - inclusive + x,
        sum_after: total - inclusive,
    }
    for kind, want in wanted.items():
        torch.testing.assert_close(kind(x, 1), want)
        torch.testing.assert_close(cut.running_sum(x, kind), want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
def test_scan_is_exclusive(reverse, decayed):
    cut = chunking(100)
    added = torch.randn(cut.count * 6, 4, 5, dtype=torch.float64)
    decay = torch.rand(cut.count * 6, 4, 1, dtype=torch.float64) if decayed else None
    got = cut.scan(added, decay, reverse=reverse).view(cut.count, 6, 4, 5)
    state = torch.zeros(6, 4, 5, dtype=torch.float64)
    for c in reversed(range(cut.count)) if reverse else range(cut.count):
        torch.testing.assert_close(got[c], state)
        here = slice(c * 6, c * 6 + 6)
        state = state * (1 if decay is None else decay[here]) + added[here]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decay_of_equals_exp(dtype):
    x = torch.tensor([0.0, -1e-3, -0.5, -5, -20, -80, RESET, 0.02, 3.0], dtype=dtype)
    torch.testing.assert_close(decay_of(x), x.exp(), rtol=80 * torch.finfo(dtype).eps, atol=0)
    assert decay_of(x)[0] == 1
    assert decay_of(x)[6] == 0
    assert torch.isnan(decay_of(torch.tensor(torch.nan)))


def test_hard_resets_become_finite():
    g = torch.tensor([[[-torch.inf, -1e38, -20.0, 0.0]]])
    assert finite_log_gate(g, torch.float32).flatten().tolist() == [RESET, RESET, -20.0, 0.0]
