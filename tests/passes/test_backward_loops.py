"""Step loops from the end: the rewriting changes no value, and what comes of it is the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.passes.analysis import analyse
from zeco_compile.passes.backward_loops import turn_around
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.report import Decision
from zeco_compile.testing import assert_equivalent, assert_refused

Loop = Callable[[Tensor, Tensor], Tensor]


def written(a: Tensor, u: Tensor) -> Tensor:
    h, out = torch.zeros_like(u[:, 0]), torch.zeros_like(u)
    for t in reversed(range(u.shape[1])):
        h = a[:, t] * h + u[:, t]
        out[:, t] = h
    return out


def listed(a: Tensor, u: Tensor) -> Tensor:
    h = u[:, -1]
    out = [h]
    for t in range(u.shape[1] - 2, -1, -1):
        h = a[:, t] * h + u[:, t]
        out.append(h)
    return torch.stack(out[::-1], dim=1)


def counted(a: Tensor, u: Tensor) -> Tensor:
    """Reads each row before it writes; what follows writes too."""
    length = u.shape[1]
    h, out = torch.zeros_like(u[:, 0]), torch.empty_like(u)
    for i in range(length):
        t = length - 1 - i
        out[:, t] = h
        h = a[:, t] * h + u[:, t]
    out[:, 0] = 1
    return out + u


def tokens_first(a: Tensor, u: Tensor) -> Tensor:
    h, rows = torch.zeros_like(u[:, 0]), []
    for now, new in zip(reversed(a.unbind(1)), reversed(u.transpose(0, 1)), strict=True):
        h = now * h + new
        rows.insert(0, h[:, None])
    return torch.cat(rows, 1)


def both_ways(a: Tensor, u: Tensor) -> Tensor:
    length = u.shape[1]
    h, there, back = torch.zeros_like(u[:, 0]), [], [u[:, 0]] * length
    for t in range(length):
        h = a[:, t] * h + u[:, t]
        there.append(h)
    for t in reversed(range(length)):
        h = a[..., t, :] * h + u.select(1, t)
        back[t] = h
    return torch.stack(there, 1) + torch.stack(back, 1)


LOOPS: dict[str, Loop] = {each.__name__: each for each in (written, listed, counted, tokens_first, both_ways)}


def _turned(loop: Loop, a: Tensor, u: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
    """The results of the graph before and after, and in how many places it was changed."""
    found: list[Any] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        before = gm(*example_inputs)
        analysis = analyse(gm, example_inputs, 1)
        decisions: list[Decision] = []
        assert analysis is not None
        places = turn_around(analysis, decisions)
        gm.graph.lint()
        gm.recompile()
        found.append((list(before), list(gm(*example_inputs)), places))
        assert bool(decisions) == bool(places)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(loop, backend=backend, fullgraph=True, dynamic=False)(a, u)
    return found[0]


@pytest.mark.parametrize("name", LOOPS)
def test_no_value_changes(name: str) -> None:
    for length in (3, 4, 6):
        a, u = torch.rand(2, length, 3), torch.randn(2, length, 3)
        before, after, places = _turned(LOOPS[name], a, u)
        assert all(map(torch.equal, before, after))
        assert places >= 2 or (length == 3 and name in ("listed", "counted"))


@pytest.mark.parametrize("name", ["listed", "counted", "tokens_first"])
def test_equal(name: str) -> None:
    assert_equivalent(lambda: Model(LOOPS[name]), _inputs, world_size=2)


class Model(nn.Module):
    """Behind projections that each step makes itself, and in front of one of all tokens."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.gate, self.inner, self.out, self.loop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), loop

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.loop(torch.sigmoid(self.gate(x)), self.inner(x)))


def _inputs() -> Tensor:
    return torch.randn(2, 8, 4, dtype=torch.float64)


def _reads_next(a: Tensor, u: Tensor) -> Tensor:
    h, out = torch.zeros_like(u[:, 0]), torch.zeros_like(u)
    for t in reversed(range(u.shape[1])):
        h = a[:, t] * h + u[:, max(t - 1, 0)]
        out[:, t] = h
    return out


def _one_step_is_special(a: Tensor, u: Tensor) -> Tensor:
    h, out = torch.zeros_like(u[:, 0]), torch.zeros_like(u)
    for t in reversed(range(u.shape[1])):
        h = a[:, t] * h + (2 * u[:, t] if t == 2 else u[:, t])
        out[:, t] = h
    return out


def _seen_on_the_way(a: Tensor, u: Tensor) -> Tensor:
    h, out, seen = torch.zeros_like(u[:, 0]), torch.zeros_like(u), torch.zeros_like(u[0, 0, 0])
    for t in reversed(range(u.shape[1])):
        h = a[:, t] * h + u[:, t]
        out[:, t] = h
        seen = seen + out.sum()
    return out + seen


def _source_is_written(a: Tensor, u: Tensor) -> Tensor:
    h, u, out = torch.zeros_like(u[:, 0]), 1 * u, torch.zeros_like(u)
    for t in reversed(range(u.shape[1])):
        h = a[:, t] * h + u[:, t]
        out[:, t] = h
        u[:, t] = 0
    return out + u


@pytest.mark.parametrize("loop", [_reads_next, _one_step_is_special, _seen_on_the_way, _source_is_written])
def test_near_misses_are_refused(loop: Loop) -> None:
    assert_refused(lambda: Model(loop), _inputs, world_size=2, error=UnsupportedOp, match="slice")
