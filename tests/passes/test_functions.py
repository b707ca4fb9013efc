"""A `torch.autograd.Function` is kept where its backward keeps to each position, and refused where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused


class ClippedRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=0.5))


class Scaled(torch.autograd.Function):
    """A gradient of its own for the weight, too: the ranks' parts add up."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 0.5 * grad * weight, (grad * x).sum((0, 1))


class SummedBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(1).cumsum(1).flip(1)


class GradientOfAllTokens(torch.autograd.Function):
    """What a position gets depends on the values at the others."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.mean(1, keepdim=True)


def _weighted(gradient):
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, gradient(grad, x, weight)

    return Weighted


NormalisedWeight = _weighted(lambda g, x, w: (g * x).sum((0, 1)) / (g * x).sum((0, 1)).norm())


class DividedByLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.length


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], weighted: bool) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(6, 6), nn.Parameter(torch.rand(6) + 0.5)
        self.function, self.weighted = function, weighted

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).square() + 0.1
        return (self.function.apply(y, self.weight) if self.weighted else self.function.apply(y)).sin()


@pytest.mark.parametrize(("function", "weighted"), [(ClippedRoot, False), (Scaled, True)])
@pytest.mark.parametrize("local_length", [5, 2])
def test_kept(function, weighted, local_length):
    assert_equivalent(
        lambda: Model(function, weighted), lambda: torch.randn(2, 2 * local_length, 6), world_size=2
    )


@pytest.mark.parametrize(
    ("function", "weighted", "why"),
    [
        (SummedBackwards, False, "depends on other positions"),
        (GradientOfAllTokens, False, "depends on other positions"),
        (NormalisedWeight, True, "more with a sum over positions"),
        (DividedByLength, False, "length of the slice"),
    ],
)
def test_refused(function, weighted, why):
    assert_refused(
        lambda: Model(function, weighted),
        lambda: torch.randn(2, 10, 6),
        world_size=2,
        error=UnsupportedOp,
        match=rf"(?s)torch.autograd.Function.*test_functions\.py.*{why}",
    )


class BesideALoop(Model):
    """The loop makes the length a constant: nothing shows where the number comes from, but another trace does."""

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(2, 6), []
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            outputs.append(h)
        return super().forward(torch.stack(outputs, 1))


@pytest.mark.parametrize("local_length", [4, 1])
def test_a_length_in_a_backward_beside_a_loop(local_length):
    assert_refused(
        lambda: BesideALoop(DividedByLength, False),
        lambda: torch.randn(2, 2 * local_length, 6),
        world_size=2,
        match=r"test_functions\.py",
    )
    if local_length > 1:
        assert_equivalent(
            lambda: BesideALoop(ClippedRoot, False), lambda: torch.randn(2, 2 * local_length, 6), world_size=2
        )


@pytest.mark.parametrize(
    "gradient",
    [
        lambda g, x, w: torch.ones_like(w),
        lambda g, x, w: (g * x).mean((0, 1)),
        lambda g, x, w: (g * x)[:, 0].sum(0),
        lambda g, x, w: (g * x).sum((0, 1)) + w,
        lambda g, x, w: (g * x).sum((0, 1)).clamp(-1, 1),
    ],
)
def test_a_parameter_s_gradient_that_is_no_sum(gradient):
    function = _weighted(gradient)
    assert_refused(
        lambda: Model(function, True),
        lambda: torch.randn(2, 10, 6),
        world_size=2,
        error=UnsupportedOp,
        match="torch.autograd.Function",
    )


class FirstPositionDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[:, 0] = 0
        return grad


def test_a_backward_that_treats_a_position_in_its_own_way():
    assert_refused(
        lambda: Model(FirstPositionDropped, False),
        lambda: torch.randn(2, 10, 6),
        world_size=2,
        error=UnsupportedOp,
        match="torch.autograd.Function",
    )


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return torch.round(4 * weight) / 4

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad * (weight.abs() < 1)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


class Normed(Clipped):
    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-3)


class OneEach(Clipped):
    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad)


class OfWhole(nn.Module):
    """The function is of a parameter, or of the mean over the sequence."""

    def __init__(self, function, pooled):
        super().__init__()
        self.function, self.pooled = function, pooled
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        if self.pooled:
            return x * self.weight + self.function.apply((x * self.weight).mean(1, keepdim=True))
        return x * self.function.apply(self.weight)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_linear_backward_of_what_does_not_run_along_the_sequence_is_kept(pooled):
    assert_equivalent(
        lambda: OfWhole(Rounded, pooled), lambda: torch.randn(2, 6, 6, dtype=torch.float64), world_size=2
    )


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("function", [Clipped, Normed, OneEach])
def test_a_backward_that_changes_a_part_of_a_gradient_is_refused(function, pooled):
    assert_refused(
        lambda: OfWhole(function, pooled),
        lambda: torch.randn(2, 6, 6, dtype=torch.float64),
        world_size=2,
        error=UnsupportedOp,
        match="more with the gradient than what is linear",
    )
