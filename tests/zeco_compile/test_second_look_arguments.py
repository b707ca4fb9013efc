"""Whatever an op is told besides its tensors may come from the length: what differs for the whole one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.testing import assert_equivalent, assert_refused

LENGTH = 10  # of the whole sequence; a slice has 5 tokens


def model(function: Callable[[Tensor, int], Tensor], loop: bool) -> nn.Module:
    class Model(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            if not loop:
                return function(a * b, a.shape[1])
            state, out = torch.zeros_like(b[:, 0]), []
            for t in range(a.shape[1]):
                state = a[:, t] * state + b[:, t]
                out.append(state)
            return function(torch.stack(out, 1), a.shape[1])

    return Model()


def case(function: Callable[[Tensor, int], Tensor], loop: bool) -> dict[str, Any]:
    def inputs() -> tuple[Tensor, Tensor]:
        return 1 - 0.3 * torch.rand(2, LENGTH, 4), torch.randn(2, LENGTH, 4)

    return {"make_model": lambda: model(function, loop), "make_inputs": inputs, "world_size": 2}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda y, t: y.sum(1) / torch.tensor(t), id="a tensor"),
        pytest.param(lambda y, t: y * torch.log(torch.tensor(float(t))), id="a logarithm of a tensor"),
        pytest.param(lambda y, t: y.sum(1) * torch.tensor([float(t)] * 20).sum(), id="a long tensor"),
        pytest.param(lambda y, t: y.sum(1) * torch.linspace(0, t, 4, dtype=y.dtype), id="bounds"),
        pytest.param(lambda y, t: (y.sum(1) * complex(0, t)).imag, id="a complex number"),
    ],
)
def test_numbers_beside_a_loop(function: Callable[[Tensor, int], Tensor]) -> None:
    assert_refused(**case(function, loop=True), match="from the length of this rank's slice")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda y, t: y.sum(1) * torch.as_tensor(t, dtype=y.dtype), id="a tensor of a dtype"),
        pytest.param(lambda y, t: F.gelu(y, approximate="tanh" if t > 7 else "none"), id="a word"),
        pytest.param(lambda y, t: y.to(torch.float32 if t > 7 else torch.float16).double(), id="a dtype"),
        pytest.param(lambda y, t: y.roll(1 if t > 7 else 2, -1), id="a shift"),
        pytest.param(lambda y, t: y[..., [0, 1, 2, 3] if t > 7 else [3, 2, 1, 0]], id="a list of places"),
        pytest.param(lambda y, t: (y.mT @ y).sum(1 if t > 7 else 2), id="a dimension"),
        pytest.param(lambda y, t: (y.mT @ y).transpose(1, 2 if t > 7 else 1), id="a transposed dimension"),
        pytest.param(lambda y, t: (y.mT @ y).permute((0, 1, 2) if t > 7 else (0, 2, 1)), id="an order"),
        pytest.param(lambda y, t: F.pad(y, (1, 0) if t > 7 else (0, 1)), id="a side"),
        pytest.param(
            lambda y, t: torch.div(y, 0.3, rounding_mode="floor" if t > 7 else "trunc"), id="a mode"
        ),
    ],
)
def test_a_branch_on_the_length(function: Callable[[Tensor, int], Tensor]) -> None:
    assert_refused(**case(function, loop=False), match="from the length of this rank's slice")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda y, t: y.sum(1) / torch.tensor(t), id="a tensor"),
        pytest.param(lambda y, t: y.sum(1) * torch.linspace(t, 1, 4, dtype=y.dtype), id="linear"),
        pytest.param(lambda y, t: y * torch.logspace(0, 1 / t, 4, dtype=y.dtype), id="logarithmic"),
    ],
)
def test_the_whole_length_where_it_is_a_symbol(function: Callable[[Tensor, int], Tensor]) -> None:
    assert_equivalent(**case(function, loop=False))
