"""Which value a loop carries on is seen from two runs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from zeco_compile.passes.analysis import State, analyse, assign_states
from zeco_compile.passes.recognize import MOST_INPUTS
from zeco_compile.passes.region import Sizes, carrying, cut_region, piecewise
from zeco_compile.passes.shift_invariance import depends_on_place

LENGTH = 4


class OneState(torch.nn.Module):
    def forward(self, a, u):
        h = torch.zeros_like(u[:, 0])
        rows = []
        for t in range(LENGTH):
            h = a[:, t] * h + u[:, t]
            rows.append(h)
        return torch.stack(rows, 1)


class TwoStates(torch.nn.Module):
    def forward(self, a, u):
        h = s = torch.zeros_like(u[:, 0])
        rows = []
        for t in range(LENGTH):
            h, s = a[:, t] * h - 0.5 * s, 0.5 * h + a[:, t] * s + u[:, t]
            rows.append(h + s)
        return torch.stack(rows, 1)


@pytest.mark.parametrize(("model", "some"), [(OneState(), True), (TwoStates(), False)])
def test_the_state_that_goes_on_is_the_one_that_does_not_depend_on_the_place(model, some):
    inputs = [torch.randn(2, LENGTH, 3, dtype=torch.float64) for _ in range(2)]
    graphs: list[fx.GraphModule] = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        analysis = analyse(gm, example_inputs, 1)
        assign_states(analysis, lambda node: False)
        end = [n for n in analysis.shadow.graph.nodes if analysis.state(n) is State.MIXED][-1]
        end = end if end.op == "call_function" else end.all_input_nodes[0]
        region = cut_region(analysis, end, MOST_INPUTS)
        assert piecewise(region, analysis)
        sizes = Sizes(analysis, 2 * LENGTH)
        dependent = [depends_on_place(each, analysis, sizes) for each in carrying(region, analysis)]
        assert any(dependent)
        assert (not all(dependent)) is some
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    assert graphs
