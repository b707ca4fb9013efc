"""Gradients that are no sum over what each position gives: taken inside of the model, or scaled by what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

GATHER = {"on_unsupported": "gather"}


def tokens() -> Tensor:
    return torch.randint(0, 7, (2, 10))


def values() -> Tensor:
    return torch.randn(2, 10, 4)


class Inner(nn.Module):
    def __init__(self, differentiate) -> None:
        super().__init__()
        self.linear, self.differentiate = nn.Linear(4, 4), differentiate

    def forward(self, x: Tensor) -> Tensor:
        return self.differentiate(self.linear(x), x)


def fast_weights(y, x):
    weights = torch.func.grad(lambda w: (x @ w - y).square().sum())(torch.zeros(4, 4, dtype=x.dtype))
    return y @ weights


def of_a_mean(y, x):
    return torch.func.grad(lambda z: z.square().mean())(y)


def pulled_back(y, x):
    sums, pull = torch.func.vjp(lambda z: z.cumsum(1), y)
    return pull(torch.ones_like(sums))[0]


def pushed_forward(y, x):
    return torch.func.jvp(lambda z: z.cumsum(1).square(), (y,), (x,))[1]


def jacobian(y, x):
    return torch.func.jacrev(lambda w: (y @ w).square().sum((0, 1)))(torch.ones(4, 4, dtype=x.dtype))


@pytest.mark.parametrize("options", [{}, GATHER])
@pytest.mark.parametrize("differentiate", [fast_weights, of_a_mean, pulled_back, pushed_forward, jacobian])
def test_gradients_inside_of_the_model_are_refused(differentiate, options):
    assert_refused(
        lambda: Inner(differentiate),
        values,
        world_size=2,
        options=options,
        error=UnsupportedOp,
        match=r"(?s)a gradient taken inside of the model.*test_gradients\.py",
    )


def test_autograd_inside_of_the_model_is_refused():
    """Dynamo leaves it in the graph where it is asked to."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            (gradient,) = torch.autograd.grad(y.cumsum(1).square().sum(), y, create_graph=True)
            return gradient

    def make_model() -> nn.Module:
        from torch import _dynamo

        if hasattr(_dynamo.config, "trace_autograd_ops"):
            _dynamo.config.trace_autograd_ops = True
        return Model()

    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        assert_refused(
            make_model,
            values,
            world_size=2,
            error=UnsupportedOp,
            match="(?s)a gradient taken inside of the model.*torch.autograd.grad",
        )


class Counting(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).square()


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_embeddings_that_look_at_all_tokens(options):
    """The first counts them in its backward, the second changes the rows of those that occur."""
    assert_refused(
        lambda: Counting(**options), tokens, world_size=2, error=UnsupportedOp, match=r"F\.embedding"
    )
    assert_equivalent(lambda: Counting(**options), tokens, world_size=2, options=GATHER)


def test_sparse_gradients_are_sums_as_others_are():
    assert_equivalent(lambda: Counting(sparse=True), tokens, world_size=2)


def test_counts_in_the_steps_of_a_loop():
    """Each step counts for itself: all tokens at once would be another count."""

    class Model(Counting):
        def forward(self, tokens: Tensor) -> Tensor:
            h, outputs = torch.zeros(2, 4, dtype=torch.float64), []
            for t in range(tokens.shape[1]):
                h = 0.5 * h + self.embedding(tokens[:, t]).sin()
                outputs.append(h)
            return torch.stack(outputs, 1)

    assert_refused(lambda: Model(scale_grad_by_freq=True), tokens, world_size=2, match=r"test_gradients\.py")
