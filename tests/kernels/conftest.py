"""Problems for the kernels, and how far an answer is from the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from zeco_compile.kernels import recurrent_gated_linear_attention

RESETS = {
    torch.float64: -1e38,
    torch.float32: -0.1 * torch.finfo(torch.float32).max,
    torch.bfloat16: -0.1 * torch.finfo(torch.bfloat16).max,
    torch.float16: -0.1 * torch.finfo(torch.float16).max,
}
GATES = ("zero", "zeros", "slow", "half", "five", "twenty", "mixed", "reset", "infinite", "gone", "positive")


@dataclass
class Problem:
    """Inputs, and the gradients of the output (do) and of the final state (dstate)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    do: Tensor
    scale: float
    state: Tensor | None
    dstate: Tensor | None

    def truth(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """[o, final state] and [dq, dk, dv, dg, dstate_in] by autograd through the float64 recurrence."""
        leaves = [
            None if x is None else x.detach().double().requires_grad_()
            for x in (self.q, self.k, self.v, self.g, self.state)
        ]
        q, k, v, g, state = leaves
        o, final = recurrent_gated_linear_attention(
            q, k, v, g, scale=self.scale, initial_state=state, output_final_state=True, dtype=torch.float64
        )
        objective = (o * self.do.double()).sum()
        if self.dstate is not None:
            objective = objective + (final * self.dstate.double()).sum()
        wanted = iter(
            torch.autograd.grad(objective, [x for x in leaves if x is not None], materialize_grads=True)
        )
        gradients = [None if x is None else next(wanted) for x in leaves]
        return [o.detach(), final.detach()], gradients


def gates(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Log gates [B, T, H, ..] of CASES: differing by head, and by channel where there are some."""
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    heads = torch.linspace(0.3, 1.7, shape[2], dtype=torch.float64)
    slow = -0.02 * noise * heads.reshape(1, 1, -1, *([1] * (len(shape) - 3)))
    rare = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.06
    g = {
        "zero": torch.zeros_like(slow),
        "zeros": torch.where(noise < 0.5, 0.0, 30 * slow),
        "slow": slow,
        "half": 50 * slow,
        "five": slow - 5,
        "twenty": slow - 20,
        "mixed": torch.where(rare, -90.0, torch.where(noise < 0.3, -20.0, slow)),
        "reset": torch.where(rare, RESETS[dtype], slow),
        "infinite": torch.where(rare, -torch.inf, slow),
        "gone": torch.full_like(slow, -torch.inf),
        "positive": -slow,
    }[name]
    return g.to(dtype)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    """make_problem(B, T, H, K, V, kind, gate, dtype=..., gate_dtype=None, state=True, dstate=True, seed=0,
    device="cpu"): kind is "none", "head" or "channel"."""

    def make(
        batch: int,
        tokens: int,
        heads: int,
        key: int,
        value: int,
        kind: str,
        gate: str = "slow",
        *,
        dtype: torch.dtype = torch.float64,
        gate_dtype: torch.dtype | None = None,
        state: bool = True,
        dstate: bool = True,
        seed: int = 0,
        device: str = "cpu",
    ) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(device=device, dtype=dtype)

        g = None
        if kind != "none":
            shape = (batch, tokens, heads, key) if kind == "channel" else (batch, tokens, heads)
            g = gates(gate, shape, gate_dtype or dtype, generator).to(device)
        boundary = [normal(batch, heads, key, value, dtype=state_dtype) for _ in range(2)]
        return Problem(
            q=normal(batch, tokens, heads, key),
            k=normal(batch, tokens, heads, key),
            v=normal(batch, tokens, heads, value),
            g=g,
            do=normal(batch, tokens, heads, value),
            scale=0.7 * key**-0.5,
            state=boundary[0] if state else None,
            dstate=boundary[1] if dstate else None,
        )

    return make


@pytest.fixture(scope="session")
def error() -> Callable[[Tensor, Tensor], float]:
    """The largest difference, relative to the truth's largest element; NaN anywhere is infinite.

    What underflows in the answer's dtype does not count.
    """

    def measure(got: Tensor, truth: Tensor) -> float:
        assert got.shape == truth.shape
        underflow = torch.finfo(got.dtype).smallest_normal
        difference = ((got.double() - truth.double()).abs().max() - underflow).clamp(min=0)
        relative = (difference / (truth.double().abs().max() + underflow)).item()
        return relative if relative == relative else float("inf")

    return measure


_NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_NEEDS_CUDA)], scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
