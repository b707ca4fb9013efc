"""Running maxima of step loops: what is one, and that the graph still computes what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import logsigmoid

from zeco_compile.marks import mark_sequence
from zeco_compile.passes.analysis import analyse
from zeco_compile.passes.plans import Ranks
from zeco_compile.passes.running_maxima import lift_maxima


def _lifted(function: Callable[..., Any], *inputs: Tensor) -> int:
    """How many maxima were lifted; outputs and gradients of the rewritten graph are those of the function."""
    counts: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        analysis = analyse(gm, example_inputs, 1)
        assert analysis is not None
        counts.append(lift_maxima(analysis, Ranks("", 0, 1), []))
        gm.graph.lint()
        gm.recompile()
        return gm

    results = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=False)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        for leaf, x in zip(leaves, inputs, strict=True):
            if x.shape[1] != 5:
                mark_sequence(leaf, None)
        torch.manual_seed(0)
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((o * torch.linspace(1, 2, o.numel()).view(o.shape)).sum() for o in outputs).backward()
        results.append([*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()
    return counts[0]


def _inputs(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def _slstm(update: Callable[..., Tensor]) -> Callable[..., Any]:
    """`update(m, lf, i, t, c)` is the next m."""

    def function(z: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        c = n = m = torch.zeros_like(z[:, 0])
        out = []
        for t in range(z.shape[1]):
            lf = logsigmoid(f[:, t])
            new = update(m, lf, i[:, t], t, c)
            kept, written = torch.exp(lf + m - new), torch.exp(i[:, t] - new)
            c, n, m = kept * c + written * z[:, t], kept * n + written, new
            out.append(c / (n + 0.1 * torch.exp(-m)))
        return torch.stack(out, 1), m

    return function


def test_states_that_begin_as_one_tensor() -> None:
    assert _lifted(_slstm(lambda m, lf, i, t, c: torch.maximum(lf + m, i)), *_inputs()) == 1
    assert _lifted(_slstm(lambda m, lf, i, t, c: torch.max(i, m + lf)), *_inputs()) == 1


def test_without_a_decay() -> None:
    assert _lifted(_slstm(lambda m, lf, i, t, c: torch.maximum(m, i)), *_inputs()) == 1


def test_decays_that_are_sums() -> None:
    assert _lifted(_slstm(lambda m, lf, i, t, c: torch.maximum(m + lf - i.exp() - 0.5, i)), *_inputs()) == 1


@pytest.mark.parametrize(
    "update",
    [
        lambda m, lf, i, t, c: torch.minimum(torch.maximum(lf + m, i), torch.ones_like(m)),
        lambda m, lf, i, t, c: torch.maximum(torch.minimum(lf + m, i), i),
        lambda m, lf, i, t, c: torch.maximum(torch.maximum(lf + m, i), c),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i + c),
        lambda m, lf, i, t, c: torch.maximum(lf + c, i),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i) * 0.5,
        lambda m, lf, i, t, c: torch.maximum(lf + 0.5 * m, i),
        lambda m, lf, i, t, c: torch.maximum(lf - m, i),
        lambda m, lf, i, t, c: torch.maximum(lf + m + m, i),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i + m),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i).detach(),
        lambda m, lf, i, t, c: torch.maximum((lf + m).detach(), i),
        lambda m, lf, i, t, c: torch.zeros_like(m) if t == 2 else torch.maximum(lf + m, i),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i + 1.0 if t == 3 else i),
        lambda m, lf, i, t, c: torch.maximum(lf + m, lf) if t == 3 else torch.maximum(lf + m, i),
        lambda m, lf, i, t, c: torch.where(i > 0, torch.maximum(lf + m, i), m),
        lambda m, lf, i, t, c: torch.maximum(lf + m, i.mean(-1, keepdim=True)),
        lambda m, lf, i, t, c: torch.maximum((lf + m).half(), i.half()).double(),
    ],
)
def test_what_is_no_running_maximum(update: Callable[..., Tensor]) -> None:
    assert _lifted(_slstm(update), *_inputs()) == 0


def _rwkv(k: Tensor, v: Tensor, aa: Tensor, bb: Tensor, pp: Tensor, w: Tensor, u: Tensor) -> Any:
    out = []
    for t in range(k.shape[1]):
        ww = u[0] + k[:, t]
        p = torch.maximum(pp, ww)
        e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
        out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
        ww = pp - torch.exp(w[0])
        p = torch.maximum(ww, k[:, t])
        e1, e2 = torch.exp(ww - p), torch.exp(k[:, t] - p)
        aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
    return torch.stack(out, 1), aa, bb, pp


def test_read_before_it_is_written() -> None:
    k, v, other = _inputs()
    states = [other[:, 0], other[:, 1].exp(), other[:, 2]]
    decays = [other[:1, 3], other[:1, 4]]
    assert _lifted(_rwkv, k, v, *states, *decays) == 1
    assert _lifted(lambda *given: _rwkv(*given)[0], k, v, *states, *decays) == 1


def test_read_in_either_step() -> None:
    def function(z: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        m, out = z.new_zeros(2, 4), []
        for t in range(z.shape[1]):
            new = torch.maximum(m + f[:, t], i[:, t])
            scale = torch.exp(-m)
            out.append(scale * z[:, t] + torch.exp(-2 * new) * scale + torch.sin(new))
            before, m = m, new
        return torch.stack(out, 1), before

    assert _lifted(function, *_inputs()) == 1


def test_random_numbers_of_it_are_drawn_once() -> None:
    def function(z: Tensor, i: Tensor, f: Tensor) -> Tensor:
        m, out = z.new_zeros(2, 4), []
        dropped = torch.nn.functional.dropout(m + 1)
        for t in range(z.shape[1]):
            before, m = dropped, torch.maximum(m + f[:, t], i[:, t])
            dropped = torch.nn.functional.dropout(m + 1)
            out.append(before * z[:, t] + dropped * i[:, t])
        return torch.stack(out, 1)

    assert _lifted(function, *_inputs()) == 0


def test_read_two_steps_later() -> None:
    def function(z: Tensor, i: Tensor, f: Tensor) -> Tensor:
        m, out, before = z.new_zeros(2, 4), [], z.new_ones(2, 4)
        for t in range(z.shape[1]):
            new = torch.maximum(m + f[:, t], i[:, t])
            out.append(torch.exp(m) * z[:, t] + torch.exp(before) + new)
            before, m = m, new
        return torch.stack(out, 1)

    _lifted(function, *_inputs())


def test_two_at_once() -> None:
    def function(z: Tensor, i: Tensor, f: Tensor) -> Tensor:
        m = n = z.new_zeros(2, 4)
        out = []
        for t in range(z.shape[1]):
            m, n = torch.maximum(m + f[:, t], i[:, t]), torch.maximum(n, z[:, t])
            out.append(m - n)
        return torch.stack(out, 1)

    assert _lifted(function, *_inputs()) == 2


def test_in_place() -> None:
    def function(z: Tensor, i: Tensor, f: Tensor) -> Tensor:
        m, out = z.new_zeros(2, 4), z.new_zeros(2, 5, 4)
        for t in range(z.shape[1]):
            m = m + f[:, t]
            m = torch.maximum(m, i[:, t])
            out[:, t] = m * z[:, t]
        return out

    def overwritten(z: Tensor, i: Tensor, f: Tensor) -> Tensor:
        m, out = z.new_zeros(2, 4), z.new_zeros(2, 5, 4)
        for t in range(z.shape[1]):
            m.copy_(torch.maximum(m + f[:, t].detach(), i[:, t].detach()))
            out[:, t] = m + z[:, t]
        return out

    assert _lifted(function, *_inputs()) == 1
    assert _lifted(overwritten, *_inputs()) == 0
