"""A buffer that is read and then changed in one forward: its gradients are those of the values that were read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.testing import assert_equivalent


class RunningMean(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.scale, self.bias = way, nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("count", torch.ones((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "whole":
            y = (x - self.mean) * self.scale
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        elif self.way == "view":
            half = self.mean[:3]
            y = (x[..., :3] - half) * self.scale[:3]
            half.copy_(x.detach().mean((0, 1))[:3])
        elif self.way == "twice":
            y = (x - self.mean) * self.scale
            self.mean.mul_(0.5)
            y = y + torch.exp(self.mean + self.bias)
            self.mean.add_(x.detach().mean((0, 1)))
            y = y + self.mean * self.scale
        else:
            y = x * self.scale * (self.count + 1)
            self.count += 1
        return y.cumsum(1)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("way", ["whole", "view", "twice", "count"])
def test_gradients_are_those_of_what_was_read(way: str, world_size: int) -> None:
    assert_equivalent(
        lambda: RunningMean(way), lambda: torch.randn(2, 6, 6, dtype=torch.float64), world_size=world_size
    )


def test_with_code_generation() -> None:
    assert_equivalent(
        lambda: RunningMean("whole"),
        lambda: torch.randn(2, 6, 6, dtype=torch.float64),
        world_size=2,
        codegen="inductor",
    )
