"""Last states, sums of steps and first tokens: what is rewritten, and that the graph still computes what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from zeco_compile.passes.analysis import Analysis, analyse
from zeco_compile.passes.collected_sums import collect_sums
from zeco_compile.passes.first_tokens import begin_with_zeros
from zeco_compile.passes.last_states import close_last_states, open_last_states, take_states_alone


def _rewritten(rewrite: Callable[[Analysis], int], function: Callable[..., Any]) -> int:
    """What `rewrite` says of the function's graph; outputs and gradients of that are those of the function."""
    counts: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        analysis = analyse(gm, example_inputs, 1)
        assert analysis is not None
        counts.append(rewrite(analysis))
        gm.graph.lint()
        gm.recompile()
        return gm

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    results = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=False)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((o * torch.linspace(1, 2, o.numel()).view(o.shape)).sum() for o in outputs).backward()
        results.append([*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    return counts[0]


def _loop(
    step: Callable[[Tensor, Tensor, Tensor, int], Tensor], first: int = 0, last: int = 5
) -> Callable[..., Tensor]:
    """Returns what `step(h, a_t, b_t, t)` has made of h; from step 1 on it begins with the first token."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        h = torch.zeros_like(b[:, 0]) if first == 0 else torch.tanh(b[:, 0])
        for t in range(first, last):
            h = step(h, a[:, t].sigmoid(), b[:, t], t)
        return h * 2

    return function


# --------------------------------------------------------------------------------------------------- last states


def _opened_and_closed(analysis: Analysis) -> int:
    opened = open_last_states(analysis, {})
    analysis.gm.graph.lint()
    return len(opened) - len(close_last_states(analysis.gm.graph, opened, []))


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (lambda h, a, b, t: a * h + b, 1),
        (lambda h, a, b, t: 0.9 * h + b, 1),
        (lambda h, a, b, t: torch.lerp(h, b, a), 1),
        (lambda h, a, b, t: torch.tanh(h + b), 1),  # tried, and not found to be linear
    ],
)
def test_last_states(step: Any, count: int) -> None:
    assert _rewritten(_opened_and_closed, _loop(step)) == count


def test_no_last_state_of_some_steps() -> None:
    assert _rewritten(_opened_and_closed, _loop(lambda h, a, b, t: a * h + b, last=4)) == 0


def test_matrix_states_are_not_put_together() -> None:
    largest: list[int] = []

    def rewrite(analysis: Analysis) -> int:
        (opened,) = open_last_states(analysis, {})
        again = analyse(analysis.gm, analysis.example_inputs, 1)
        assert again is not None
        largest.append(max(node.meta["val"].numel() for node in again.shadow.groups[opened.rows]))
        return len(close_last_states(analysis.gm.graph, [opened], []))

    def function(a: Tensor, b: Tensor) -> Tensor:
        S = b.new_zeros(2, 4, 4)
        for t in range(5):
            S = a[:, t, :, None].sigmoid() * S + a[:, t, :, None] * b[:, t, None, :]
        return S.tanh()

    assert _rewritten(rewrite, function) == 0
    assert largest == [2 * 5 * 4]


def test_the_state_alone_is_computed_where_it_alone_is_read() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        q = k = a.unsqueeze(2)
        _, state = torch.ops.zeco.gated_linear_attention.default(
            q, k, b.unsqueeze(2), None, 1.0, None, True, "auto", 0, ""
        )
        return state

    assert _rewritten(lambda analysis: take_states_alone(analysis.gm.graph), function) == 1


# ------------------------------------------------------------------------------------------------- sums of steps


@pytest.mark.parametrize(
    ("term", "count"),
    [
        (lambda h, b, t: (h - b).pow(2).mean(), 1),
        (lambda h, b, t: h.exp(), 1),
        (lambda h, b, t: b, 1),
        (lambda h, b, t: h * t, 0),
        (lambda h, b, t: h if t else h * 2, 0),
    ],
)
@pytest.mark.parametrize("start", ["number", "tensor", "first"])
def test_sums(term: Callable[..., Tensor], count: int, start: str) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.zeros_like(b[:, 0])
        total: Any = {"number": 0, "tensor": b.new_ones(()), "first": None}[start]
        for t in range(5):
            h = a[:, t].sigmoid() * h + b[:, t]
            added = term(h, b[:, t], t)
            total = added if total is None else total + added
        return total * 3, h

    found = _rewritten(lambda analysis: collect_sums(analysis, []), function)
    assert found == count


def test_no_sum_that_a_step_reads() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        h = total = torch.zeros_like(b[:, 0])
        for t in range(5):
            h = a[:, t].sigmoid() * h + b[:, t] + 0.1 * torch.tanh(total)
            total = total + h
        return total

    assert _rewritten(lambda analysis: collect_sums(analysis, []), function) == 0


# ------------------------------------------------------------------------------------------------- first tokens


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (lambda h, a, b, t: a * h + b, 1),
        (lambda h, a, b, t: 0.7 * h + 0.3 * b, 1),
        (lambda h, a, b, t: a * h + (1 - a) * torch.tanh(b), 1),
        (lambda h, a, b, t: torch.lerp(h, b, 0.3), 1),
        (lambda h, a, b, t: torch.tanh(h) + b, 0),
        (lambda h, a, b, t: a * h + b * t, 0),
        (lambda h, a, b, t: b if t == 3 else a * h + b, 0),
        (lambda h, a, b, t: a * h + b.abs().sqrt(), 0),  # the first token's may have no gradient
    ],
)
def test_first_tokens(step: Any, count: int) -> None:
    assert _rewritten(lambda analysis: begin_with_zeros(analysis, []), _loop(step, first=1)) == count


def test_loops_from_zeros_begin_as_they_do() -> None:
    loop = _loop(lambda h, a, b, t: a * h + b)
    assert _rewritten(lambda analysis: begin_with_zeros(analysis, []), loop) == 0
