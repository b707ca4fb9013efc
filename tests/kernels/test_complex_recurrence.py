"""The complex recurrence in chunks: against the same step by step, with its gradients by autograd."""

from __future__ import annotations

import pytest
import torch

from zeco_compile.kernels.complex_recurrence import CHUNK, gradients, rank_dstate, rank_state, states


def step_by_step(a: torch.Tensor, u: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    a, rows = a.expand(u.shape), []
    for t in range(u.shape[1]):
        state = a[:, t] * state + u[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


def drawn(length: int, width: int, same: bool) -> tuple[torch.Tensor, ...]:
    """a, u, state; of the decays some are zero and some beyond one."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.complex128)

    shape = (1, 1, width) if same else (2, length, width)
    size = torch.rand(shape, generator=draw, dtype=torch.float64) * 0.3 + 0.72
    a = size * torch.sgn(normal(*shape))
    a[..., 0] = 0
    if not same:
        a[:, length // 2] = 0
    return a, normal(2, length, width), normal(2, width)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-12 * expected.abs().max())


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    "length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, CHUNK * CHUNK + CHUNK + 1]
)
def test_states_and_gradients(length: int, same: bool) -> None:
    a, u, state = (x.requires_grad_() for x in drawn(length, 3, same))
    h = step_by_step(a, u, state)
    dh, dlast = torch.randn_like(h), torch.randn_like(state)
    expected = torch.autograd.grad([h, h[:, -1]], [a, u, state], [dh, dlast])
    with torch.no_grad():
        assert close(states(a, u, state), h)
        found = gradients(a, h, state, dh, dlast)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert close(one, other)
        product, made = rank_state(a, u)
        assert close(product * state + made, h[:, -1])
        assert close(rank_dstate(a, dh) + product.conj() * dlast, expected[2])


def test_slow_decays_in_single_precision() -> None:
    """A phase that is the same at every step is not lost over many."""
    length = 20 * CHUNK * CHUNK
    a = torch.polar(torch.full((1, 1, 8), 0.99999), torch.linspace(0.1, 3.0, 8).view(1, 1, 8))
    u = torch.zeros(1, length, 8, dtype=torch.complex64)
    u[:, 0] = 1
    h = states(a, u, torch.zeros(1, 8, dtype=torch.complex64))
    expected = a[:, 0].to(torch.complex128) ** (length - 1)
    assert bool(((h[:, -1] - expected).abs() <= 1e-5 * expected.abs()).all())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    a, u, state = (x.to(dtype) for x in drawn(3 * CHUNK + 1, 2, same=False))
    results = [states(a, u, state), *rank_state(a, u), rank_dstate(a, u), *gradients(a, u, state, u, state)]
    assert {x.dtype for x in results} == {dtype}
