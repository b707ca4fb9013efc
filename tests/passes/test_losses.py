"""Losses over a part of the sequence: rows against the next ones, in the ways people write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

VOCABULARY = 7


def _labels(tokens: Tensor) -> Tensor:
    return torch.where(tokens == 3, -100, tokens)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # of logits [B, T, V], tokens [B, T] and values [B, T, V]
    "cross entropy, flattened": lambda y, t, z: F.cross_entropy(
        y[:, :-1].reshape(-1, VOCABULARY), t[:, 1:].reshape(-1)
    ),
    "cross entropy, classes second": lambda y, t, z: F.cross_entropy(y[:, :-1].transpose(1, 2), t[:, 1:]),
    "cross entropy, scaled logits": lambda y, t, z: F.cross_entropy(
        (y[:, :-1] / 0.7).flatten(0, 1), t[:, 1:].flatten(), reduction="sum"
    ),
    "cross entropy, ignored labels": lambda y, t, z: F.cross_entropy(
        y[:, :-1].flatten(0, 1).double(), _labels(t[:, 1:]).flatten(), label_smoothing=0.1
    ),
    "cross entropy of each token, masked mean": lambda y, t, z: (
        (F.cross_entropy(y[:, :-1].mT, t[:, 1:], reduction="none") * (t[:, 1:] != 3)).sum()
        / (t[:, 1:] != 3).sum()
    ),
    "gathered log probabilities": lambda y, t, z: (
        -y.log_softmax(-1)[:, :-1].gather(-1, t[:, 1:, None]).mean()
    ),
    "one-hot product": lambda y, t, z: (
        -(y[:, :-1].log_softmax(-1) * F.one_hot(t, VOCABULARY)[:, 1:]).sum(-1).mean()
    ),
    "mean squared error": lambda y, t, z: F.mse_loss(y[:, :-1], z[:, 1:]),
    "summed squared error": lambda y, t, z: F.mse_loss(y[:, :-1], z[:, 1:], reduction="sum"),
    "absolute error": lambda y, t, z: F.l1_loss(y[:, :-1], z[:, 1:]),
    "smooth error": lambda y, t, z: F.smooth_l1_loss(y[:, :-1], z[:, 1:], beta=0.3),
    "huber": lambda y, t, z: F.huber_loss(y[:, :-1], z[:, 1:], delta=0.7),
    "binary, with logits": lambda y, t, z: F.binary_cross_entropy_with_logits(y[:, :-1], z[:, 1:].sigmoid()),
    "divergence": lambda y, t, z: F.kl_div(y[:, :-1].log_softmax(-1), z[:, 1:].softmax(-1), reduction="sum"),
    "roughness": lambda y, t, z: (y[:, 1:] - y[:, :-1]).square().mean(),
    "roughness of each sequence": lambda y, t, z: (y[:, 1:] - y[:, :-1]).abs().sum((1, 2)),
    "curvature": lambda y, t, z: (y[:, 2:] - 2 * y[:, 1:-1] + y[:, :-2]).pow(2).mean(dim=1, keepdim=True),
    "without the first": lambda y, t, z: y[:, 1:].logsumexp(-1).mean(),
    "without the last two": lambda y, t, z: y[:, :-2].square().sum(dim=1).mean(),
    "two ahead": lambda y, t, z: F.cross_entropy(y[:, :-2].flatten(0, 1), t[:, 2:].flatten()),
    "three ahead, of which a slice has one row": lambda y, t, z: F.cross_entropy(
        y[:, :-3].flatten(0, 1), t[:, 3:].flatten()
    ),
    "cosine": lambda y, t, z: (1 - F.cosine_similarity(y[:, :-1], z[:, 1:], dim=-1)).mean(),
    "next token accuracy and loss": lambda y, t, z: (
        (y[:, :-1].argmax(-1) == t[:, 1:]).float().mean() + F.mse_loss(y[:, :-1], z[:, 1:])
    ),
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)
        self.mix = nn.Linear(VOCABULARY, VOCABULARY)
        self.name = name

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens) + values)
        x = x + torch.tril(x @ x.mT) @ values
        return LOSSES[self.name](x, tokens, values)


def _inputs(length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (
        torch.randint(VOCABULARY, (2, length)),
        torch.randn(2, length, VOCABULARY, dtype=torch.float64),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    found = assert_equivalent(lambda: Model(name), _inputs(8), world_size=2)
    decisions = [d for d in found.reports[0]["decisions"] if d["decision"] == "all-reduce"]
    assert decisions
    assert all("of the whole sequence" in d["detail"] for d in decisions if "sum over" in d["detail"])


@pytest.mark.parametrize("name", ["cross entropy, flattened", "mean squared error", "curvature"])
@pytest.mark.parametrize(("world_size", "local_length"), [(3, 3)])
def test_loss_on_more_ranks(name: str, world_size: int, local_length: int) -> None:
    assert_equivalent(lambda: Model(name), _inputs(world_size * local_length), world_size=world_size)


def test_a_batch_that_varies_and_is_as_large_as_the_slice() -> None:
    def loss(x: Tensor) -> Tensor:
        return (x[:, 1:] - x[:, :-1]).abs().mean()

    def inputs() -> Tensor:
        return torch.randn(4, 8, 3, dtype=torch.float64)

    assert_equivalent(lambda: loss, inputs, world_size=2, dynamic=True)


def test_values_without_a_limit_in_rows_that_do_not_count() -> None:
    """Behind the last row there is nothing: what is computed there must not reach a gradient."""

    def loss(x: Tensor) -> Tensor:
        return (x[:, :-1] * x[:, 1:].log()).mean() + (1 / x[:, 1:]).sum()

    assert_equivalent(lambda: loss, lambda: torch.rand(2, 6, 3, dtype=torch.float64) + 0.5, world_size=2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (x[:, 1:] - x[:, :-1]).cumsum(1).mean(),
        lambda x: (x[:, 1:] - x[:, :-1]).amax(),
        lambda x: x[:, 1:] - x[:, :-1],
        lambda x: (x[:, 1:].flip(1) * x[:, :-1]).sum(),
        lambda x: (x[:, ::2] * x[:, 1::2]).mean(),
        lambda x: (x[:, 1:] - x[:, :-1]).std(),
        lambda x: F.dropout(x[:, 1:] - x[:, :-1], 0.5).mean(),
        lambda x: F.mse_loss(x[:, 1:].flatten(0, 1), x[:, :-1].transpose(0, 1).flatten(0, 1)),
        lambda x: F.cross_entropy(x[:, 1:].flatten(0, 1), x[:, :-1].argmax(-1).t().flatten()),
        lambda x: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).t().flatten()),
        lambda x: F.cross_entropy(x[:, 1:], torch.ones(2, 3, dtype=torch.long)),
        lambda x: F.nll_loss(x, torch.ones(2, 3, dtype=torch.long), weight=x.detach()[0, :, 0].exp()),
        lambda x: F.cross_entropy(x, torch.ones(2, 3, dtype=torch.long), label_smoothing=0.1),
        lambda x: F.multi_margin_loss(x[..., 0], torch.ones(2, dtype=torch.long)),
    ],
)
def test_other_things_done_with_such_rows_are_refused(loss: Callable[[Tensor], Tensor]) -> None:
    assert_refused(
        lambda: loss,
        lambda: torch.randn(2, 8, 3, dtype=torch.float64),
        world_size=2,
        error=UnsupportedOp,
        match="sequence",
    )
