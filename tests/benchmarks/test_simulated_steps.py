"""What exchanges add to a simulated step."""

from __future__ import annotations

import pytest
from paper_model import LAYERS
from simulated_scans import Machine
from simulated_steps import Layer, step

from zeco_compile.lowering.cost_model import LinkCost, LinkCosts


def test_a_step():
    forward, backward = Layer.of(1.0, 2.0), Layer.of(2.0, 4.0)
    alone = step("none", Machine.of(1), forward, backward, 16)
    assert alone == pytest.approx(LAYERS * 9.0)
    assert step("all_scan", Machine.of(1), forward, backward, 16) == pytest.approx(alone)
    costs = LinkCosts(LinkCost(1e-3, 0.0, 0.0, "given"), LinkCost(1e-3, 0.0, 0.0, "given"))
    machine = Machine.of(4, 4, costs)
    assert step("all_scan", machine, forward, backward, 16) == pytest.approx(alone)  # hidden
    slow = LinkCosts(LinkCost(10.0, 0.0, 0.0, "given"), LinkCost(10.0, 0.0, 0.0, "given"))
    machine = Machine.of(2, 2, slow)
    # the second rank runs late once, by what its first scan leaves uncovered, not once a layer
    both = step("all_scan", machine, forward, backward, 16)
    assert both == pytest.approx(alone + (10 - 0.3) + (10 - 0.6))
