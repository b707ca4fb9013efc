"""`on_unsupported="gather"`: what cannot be split is computed on the whole sequence, and is then what it should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

GATHER = {"on_unsupported": "gather"}
WIDTH = 4


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(40, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def attention(model: Model, x: Tensor) -> Tensor:
    sums = F.logsigmoid(x[..., 0]).cumsum(1)
    decays = (sums[:, :, None] - sums[:, None, :]).exp().tril()
    return ((model.query(x) @ model.key(x).mT) * decays) @ x


def inputs() -> Tensor:
    return torch.randn(2, 12, WIDTH)


def whole(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype)


BESIDE_OTHER_REWRITES = {
    "reversed sums": lambda m, x: m.query(x).flip(1).cumsum(1).flip(1),
    "sums of a softmax": lambda m, x: (m.query(x).softmax(1).cumsum(1) * x).sum(),
    "sums, sorted": lambda m, x: (m.query(x).cumsum(1).sort(1)[0] * x).mean(1),
    "attention, then a softmax": lambda m, x: attention(m, x).softmax(1),
    "a norm of sums": lambda m, x: F.layer_norm(x.cumsum(1), x.shape[1:]),
    "shifted after sorting": lambda m, x: F.pad(m.query(x).sort(1)[0], (0, 0, 1, -1)),
    "positions after sorting": lambda m, x: m.query(x).sort(1)[0] * whole(x)[:, None],
    "rows of a table, sorted": lambda m, x: m.query(x) + m.table[: x.shape[1]].sort(0)[0],
}
CONSTANTS_OF_THE_LENGTH = {
    "largest position": lambda m, x: m.query(x) / whole(x).max(),
    "positions, sorted": lambda m, x: m.query(x) * whole(x).sort(descending=True)[0][:, None],
    "positions, softmax": lambda m, x: m.query(x) * whole(x).softmax(0)[:, None],
    "ones, summed": lambda m, x: m.query(x) / torch.ones(x.shape[1]).cumsum(0).amax(),
    "rows of a triangle": lambda m, x: (
        (t := torch.ones(x.shape[1], x.shape[1]).tril().to(x)) / t.sum(1, True) @ m.query(x)
    ),
    "ones like a value": lambda m, x: torch.cat([torch.ones_like(x), m.query(x).sort(1)[0]], 1).sum(1),
    "a size kept in a variable": lambda m, x: m.query(x).transpose(1, 2).reshape(x.size()),
}
AXES_NOT_KNOWN = {
    "differences": lambda m, x: torch.diff(m.query(x), dim=1, prepend=torch.zeros_like(x[:, :1])),
    "an operator": lambda m, x: torch.cond(x.sum() > 0, lambda y: y.flip(1), lambda y: y * 3, (m.query(x),)),
    "pairs, in two parts": lambda m, x: torch.cat(
        [s @ x for s in (m.query(x) @ x.mT).relu().chunk(2, 0)], 1
    ).sum(1),
}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, id=name)
        for cases in (BESIDE_OTHER_REWRITES, CONSTANTS_OF_THE_LENGTH, AXES_NOT_KNOWN)
        for name, function in cases.items()
    ],
)
def test_equal(function):
    assert_equivalent(lambda: Model(function), inputs, world_size=2, options=GATHER)


def tanh_recurrence(m, x):
    return torch.stack([h := x[:, 0]] + [h := (h + x[:, t]).tanh() for t in range(1, x.shape[1])], 1)


GATHERED = 'set options={"on_unsupported": "gather"}'


@pytest.mark.parametrize(
    ("function", "helps"),
    [
        (lambda m, x: m.query(x).sort(1)[0], True),
        (lambda m, x: m.query(x).sort(1)[0].cummax(1).values, True),
        (lambda m, x: torch.fft.fft(x, dim=1).real, True),
        (tanh_recurrence, False),
    ],
)
def test_the_option_is_advised_where_it_helps(function, helps):
    (message, _) = assert_refused(lambda: Model(function), inputs, world_size=2)
    assert (GATHERED in message) == helps


def test_the_option_is_not_advised_where_it_is_set():
    (message, _) = assert_refused(lambda: Model(tanh_recurrence), inputs, world_size=2, options=GATHER)
    assert GATHERED not in message
    assert "zeco_compile.gather_sequence" in message


def test_a_range_of_constant_steps_is_equal_as_the_message_has_it():
    def model(m: Model, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x * (-1 + torch.arange(length, dtype=x.dtype) * ((2 - -1) / (length - 1)))[:, None]

    assert_equivalent(lambda: Model(model), inputs, world_size=2)


def test_equal_on_three_ranks():
    assert_equivalent(
        lambda: Model(lambda m, x: attention(m, x).topk(3, dim=1)[0]), inputs, world_size=3, options=GATHER
    )


def written(m: Model, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = m.query(x).sort(1)[0][:, :-1]
    return out + out.sort(1)[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_others_read_what_is_written_to(ranks):
    assert_equivalent(lambda: Model(written), inputs, world_size=ranks, options=GATHER)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, x: torch.cat([m.query(x), x.flip(1)], 1), id="twice as many rows"),
        pytest.param(lambda m, x: torch.vmap(lambda q: (q @ q.mT).relu() @ q)(m.query(x)), id="vmap"),
    ],
)
def test_what_cannot_be_copied_is_refused(function):
    assert_refused(
        lambda: Model(function),
        inputs,
        world_size=2,
        options=GATHER,
        error=UnsupportedOp,
        match=r"test_gather\.py",
    )
