"""The attention matrix inside a chunk against its definition, and its gradients against autograd."""

from __future__ import annotations

import pytest
import torch

from zeco_compile.kernels.pairs import pairs, pairs_backward


def by_definition(q, k, g):
    size = q.shape[1]
    out = q.new_zeros(q.shape[0], size, size)
    for i in range(size):
        for j in range(i + 1):
            decay = 1.0 if g is None else g[:, j + 1 : i + 1].sum(1).exp()
            out[:, i, j] = (q[:, i] * k[:, j] * decay).sum(-1)
    return out


def inputs(size, kind, strength):
    generator = torch.Generator().manual_seed(size)
    q, k, noise = (torch.randn(3, size, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    g = {"none": None, "head": -strength * noise[..., :1].abs(), "channel": -strength * noise.abs()}[kind]
    return q, k, g


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32])
@pytest.mark.parametrize("kind", ["none", "head", "channel"])
@pytest.mark.parametrize("strength", [0.05, 20.0])
def test_equals_the_definition(size, kind, strength):
    leaves = [None if x is None else x.requires_grad_() for x in inputs(size, kind, strength)]
    want = by_definition(*leaves)
    torch.testing.assert_close(pairs(*(None if x is None else x.detach() for x in leaves)), want.detach())
    dpairs = torch.randn(want.shape, dtype=torch.float64).tril_()
    wanted = torch.autograd.grad(want, [x for x in leaves if x is not None], dpairs, materialize_grads=True)
    got = pairs_backward(dpairs, *(None if x is None else x.detach() for x in leaves))
    torch.testing.assert_close(got.pairs, want.detach())
    for a, b in zip([x for x in got[1:] if x is not None], wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_strong_gates_cost_the_small_gradients_nothing(kind):
    """Every contribution to dg is about e^-20 here, 1e9 times below those of the pairs i = j."""
    q, k, g = inputs(16, kind, 0.1)
    g = g - 20
    dpairs = torch.ones(3, 16, 16, dtype=torch.float64).tril_()
    exact = pairs_backward(dpairs, q, k, g).dg
    single = pairs_backward(dpairs.float(), q.float(), k.float(), g.float()).dg
    assert ((single - exact).abs().max() / exact.abs().max()).item() <= 1e-5
    assert exact.abs().max() < 1e-7
