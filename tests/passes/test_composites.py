"""What is computed of all positions at once: calls whose ATen ops sum, or look for extremes, over the sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp, ZecoError
from zeco_compile.testing import assert_equivalent, assert_refused

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    # of y and x: [B, T, 4]
    "losses that reduce": lambda y, x: (
        F.huber_loss(y, x, delta=0.5)
        + F.smooth_l1_loss(y, x)
        + F.binary_cross_entropy_with_logits(y, x.sigmoid())
        + F.binary_cross_entropy(y.sigmoid(), x.sigmoid())
        + F.soft_margin_loss(y, x.detach().sign())
    ),
    "divergence, flattened, by the batch": lambda y, x: F.kl_div(
        y.flatten(0, 1).log_softmax(-1), x.flatten(0, 1).softmax(-1), reduction="batchmean"
    ),
    "cross entropy with probabilities": lambda y, x: F.cross_entropy(
        y.flatten(0, 1), x.softmax(-1).flatten(0, 1)
    ),
    "negative log likelihood": lambda y, x: (
        F.nll_loss(y.log_softmax(-1).flatten(0, 1), x.argmax(-1).flatten(), ignore_index=1)
        + F.nll_loss(y.log_softmax(-1).mT, x.argmax(-1), reduction="sum")
    ),
    "negative log likelihood of positions": lambda y, x: (
        F.cross_entropy(y, torch.tensor([[0, 5, 3, 7], [7, 1, 3, 3]]), ignore_index=3, reduction="none").sum()
        + F.cross_entropy(y.mT.flatten(0, 1), torch.full((8,), 6), reduction="sum")
        + F.nll_loss(y[..., 0].log_softmax(1), torch.tensor([2, -100]))
    ),
    "cross entropy with probabilities of positions": lambda y, x: F.cross_entropy(y, x.softmax(1)),
    "cosine similarity": lambda y, x: F.cosine_similarity(y, x, dim=1),
    "deviation that is zero": lambda y, x: (y * torch.tensor([0.0, 1, 1, 1], dtype=x.dtype)).std(1),
    "equal extremes": lambda y, x: (y.clamp(-0.1, 0.1).amax(1), y.clamp(-0.1, 0.1).min(), y.amin((1, 2))),
    "norms": lambda y, x: (y.norm(dim=1), torch.linalg.vector_norm(y, 1, 1), y.norm(float("inf"), dim=1)),
    "softmax with positions masked": lambda y, x: (
        y.masked_fill(torch.arange(x.shape[1])[:, None] < 5, -torch.inf).softmax(1)
        * y.masked_fill(torch.arange(x.shape[1])[:, None] < 5, -torch.inf).logsumexp(1, keepdim=True)
    ),
    "any and all": lambda y, x: y * (x > 1).any(1, keepdim=True) + (x > -9).all(1, keepdim=True),
    "numbers of elements": lambda y, x: y.sum() / y.numel() + y[:, 1:].sum() / y[:, 1:].numel(),
}


class Model(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.call(self.inner(x), x)


def _inputs(length: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    call = CALLS[name]
    assert_equivalent(lambda: Model(call), _inputs(12), world_size=3, rtol=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda y, x: y.kthvalue(2, 1),
        lambda y, x: y.norm(3, dim=1),
        lambda y, x: y[:, 1:].softmax(1),
        lambda y, x: y.view(y.shape[0], -1, 2, 4).amax(2),
        lambda y, x: y.median(1).values,
        lambda y, x: F.layer_norm(y.mT, (y.shape[1],)),
    ],
)
def test_others_are_refused(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_refused(lambda: Model(call), _inputs(8), world_size=2, error=UnsupportedOp, match="sequence")


def test_a_number_that_may_be_the_length_is_refused() -> None:
    """The loop makes the length a constant, and the number of rows that the mean is taken over with it."""

    def model(x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        return F.kl_div(y.flatten(0, 1).log_softmax(-1), x.flatten(0, 1).softmax(-1), reduction="batchmean")

    assert_refused(lambda: model, _inputs(8), world_size=2, error=ZecoError, match="kl_div")


@pytest.mark.parametrize("of_a_value", [False, True])
def test_weights_of_a_shifted_loss_beside_a_loop(of_a_value: bool) -> None:
    """The loop makes the length a constant, and rows of numbers that are made of it anything; the message says so."""

    def model(x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        made = torch.arange(x.shape[1], dtype=x.dtype)
        weights = torch.ones_like(x[0, :, 0]).cumsum(0) - 1 if of_a_value else made
        return (weights[1:] * (y[:, :-1] - x[:, 1:]).pow(2).sum(-1)).sum()

    if of_a_value:
        assert_equivalent(lambda: model, _inputs(8), world_size=2)
    else:
        assert_refused(lambda: model, _inputs(8), world_size=2, error=UnsupportedOp, match="rows of `made`")
