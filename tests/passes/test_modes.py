"""What autograd and autocast are asked for inside of a model is kept: refused rather than computed in another mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeco_compile
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _loop(step: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def run(m: Model, x: Tensor) -> Tensor:
        h = x.new_zeros(2, 6)
        outputs = []
        for t in range(x.shape[1]):
            h, y = step(m, x[:, t], h)
            outputs.append(y)
        return torch.stack(outputs, 1)

    return run


def _gate_without_gradient(m, x, h):
    with torch.no_grad():
        f = torch.sigmoid(m.a(x))
    h = f * h + m.b(x)
    return h, h


def _norm_without_gradient(m, x, h):
    h = torch.sigmoid(m.a(x)) * h + m.b(x)
    with torch.no_grad():
        norm = h.norm(dim=-1, keepdim=True) + 1
    return h, h / norm


def _function_on_the_output(m, x, h):
    h = torch.sigmoid(m.a(x)) * h + m.b(x)
    return h, torch.tanh(Half.apply(h))


def _function_on_the_token(m, x, h):
    x = Half.apply(m.c(x))
    h = torch.sigmoid(m.a(x)) * h + m.b(x)
    return h, h


def _truncated(m, x, h):
    h = torch.sigmoid(m.a(x)) * h.detach() + m.b(x)
    return h, h


def _average_without_gradient(m, x, h):
    with torch.no_grad():
        h = 0.9 * h + 0.1 * m.b(x)
    return h, m.c(x) - h


def _scores_without_gradient(m, x):
    with torch.no_grad():
        scores = (m.a(x) @ m.b(x).mT).tril()
    return scores @ m.c(x)


def _function_on_the_scores(m, x):
    return Half.apply(m.a(x) @ m.b(x).mT).tril() @ x


def _decay_detached(m, x):
    sums = F.logsigmoid(m.c(x)[..., 0]).cumsum(1)
    decay = (sums[:, :, None] - sums[:, None]).tril().exp().tril().detach()
    return (m.a(x) @ m.b(x).mT * decay) @ x


def _hook(m, x):
    q = m.a(x)
    if q.requires_grad:
        q.register_hook(lambda grad: grad * 0.5)
    return (q @ m.b(x).mT).tril() @ x


def _softmax_without_gradient(m, x):
    with torch.no_grad():
        scores = (m.a(x) @ m.b(x).mT).softmax(-1)
    return scores @ m.c(x)


def _inputs() -> Tensor:
    return torch.randn(2, 8, 6, dtype=torch.float64)


REFUSED = {
    f.__name__.strip("_"): f if f.__code__.co_argcount == 2 else _loop(f)
    for f in (
        _gate_without_gradient, _norm_without_gradient, _function_on_the_output,
        _function_on_the_token, _truncated, _average_without_gradient, _scores_without_gradient,
        _function_on_the_scores, _decay_detached, _hook, _softmax_without_gradient,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function = REFUSED[name]
    assert_refused(
        lambda: Model(function), _inputs, world_size=2, error=UnsupportedOp, match="mode|gradient|sequence"
    )


def _stopped_before(m, x):
    """A gradient that stops in front of the attention: nothing of it is rewritten."""
    return (m.a(x).detach() @ m.b(x).mT).tril() @ m.c(x)


def _whole_attention_without_gradient(m, x):
    with torch.no_grad():
        y = (m.a(x) @ m.b(x).mT).tril() @ x
    return m.c(x) + y


def _mask_without_gradient(m, x):
    with torch.no_grad():
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (m.a(x) @ m.b(x).mT).masked_fill(~mask, 0) @ m.c(x)


def _straight_through(m, x):
    y = (m.a(x) @ m.b(x).mT).tril() @ m.c(x)
    return y + (y.round() - y).detach()


def _recurrence_in_full_precision(m, x):
    with torch.autocast("cpu", enabled=False):
        y = _loop(lambda m, x, h: [torch.sigmoid(m.a(x)) * h + m.b(x)] * 2)(m, x)
    return y.softmax(1) * x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    "function",
    [
        _recurrence_in_full_precision,
        _stopped_before,
        _whole_attention_without_gradient,
        _mask_without_gradient,
        _straight_through,
    ],
)
def test_equal(function: Callable[..., Tensor]) -> None:
    found = assert_equivalent(lambda: Model(function), _inputs, world_size=2)
    assert len(found.regions) == 1


def test_what_runs_in_autocast_does_not_leave_it() -> None:
    """A step whose output is computed in another precision than its state: refused, or rounded where eager rounds."""

    def steps(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        h, outputs = b.new_zeros(2, 6), []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for t in range(a.shape[1]):
                with torch.autocast("cpu", enabled=False):
                    h = a[:, t] * h + b[:, t]
                    y = h @ w
                outputs.append(y)
            return torch.stack(outputs, 1)

    a, b, w = torch.rand(2, 4, 6), torch.randn(2, 4, 6), zeco_compile.mark_sequence(torch.randn(6, 6), None)
    compiled = torch.compile(steps, backend="zeco", fullgraph=True, options={"codegen": "aot_eager"})
    torch.testing.assert_close(compiled(a, b, w), steps(a, b, w), rtol=1e-6, atol=1e-6)


def _target_without_gradient(m, x):
    y = m.a(x)
    with torch.no_grad():
        target = y[:, 1:]
    return (y[:, :-1] - target).square().mean()


def _shift_without_gradient(m, x):
    y, p = m.a(x), torch.zeros_like(x)
    with torch.no_grad():
        before = y[:, :-1]
    p[:, 1:] = before
    return p * y


def _joined_without_gradient(m, x):
    y = m.a(x)
    with torch.no_grad():
        before = y[:, :-1]
    return torch.cat([torch.zeros_like(y[:, :1]), before], 1) * y


def _padded_without_gradient(m, x):
    y = m.a(x)
    with torch.no_grad():
        before = y[:, :-1]
    return F.pad(before, (0, 0, 1, 0)) * y


@pytest.mark.parametrize(
    "function",
    [_target_without_gradient, _shift_without_gradient, _joined_without_gradient, _padded_without_gradient],
)
def test_rows_cut_off_without_gradient(function: Callable[..., Tensor]) -> None:
    assert_refused(lambda: Model(function), _inputs, world_size=2, error=UnsupportedOp, match="sequence")
