"""The final state alone equals the one that comes with the outputs, with its gradients."""

from __future__ import annotations

import pytest
import torch

import zeco_compile.lowering  # noqa: F401  (registers the ops)
from zeco_compile.kernels.errors import InvalidShapes

zeco = torch.ops.zeco


@pytest.mark.parametrize("gate", [None, (3,), (2, 7, 3), (2, 7, 3, 4)])
@pytest.mark.parametrize("given", [False, True])
def test_equals_the_operators(gate: tuple[int, ...] | None, given: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()

    k, v = leaf(2, 7, 3, 4), leaf(2, 7, 3, 5)
    g = None if gate is None else leaf(*gate)
    start = leaf(2, 3, 4, 5) if given else None
    inputs = [x for x in (k, v, g, start) if x is not None]
    both = []
    for alone in (False, True):
        log_decay = None if g is None else -g.abs()
        if alone:
            state = zeco.final_state_of(k, v, log_decay, start, "auto", 0, "")
        else:
            state = zeco.gated_linear_attention(k, k, v, log_decay, 1.0, start, True, "auto", 0, "")[1]
        weight = torch.linspace(0.5, 1.5, state.numel(), dtype=torch.float64).view(state.shape)
        both.append([state, *torch.autograd.grad((state * weight).sum(), inputs)])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a_gate_of_other_heads_is_refused() -> None:
    k = torch.randn(2, 7, 3, 4)
    with pytest.raises(InvalidShapes):
        zeco.final_state_of(k, k, torch.zeros(2), None, "auto", 0, "")
