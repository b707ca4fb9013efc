"""The simulation agrees with the cost model's formulas where these are exact, and with itself where time is added."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCost, LinkCosts

COSTS = LinkCosts(LinkCost(5.0, 1.0, 5.0, "given"), LinkCost(20.0, 2.0, 20.0, "given"))


@pytest.fixture(scope="module")
def simulate() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "simulate.py"
    spec = importlib.util.spec_from_file_location("simulate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("schedule", cost_model.SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_on_one_host_it_is_the_formula(simulate, schedule, ranks):
    machine = simulate.Machine.of(ranks, ranks, COSTS)
    for blocks in (1, 4):
        got = max(simulate.scan(schedule, machine, state=100.0, decay=0.0, blocks=blocks))
        expected = cost_model.seconds(schedule, COSTS, machine.hosts, 100.0, 0.0, blocks)
        assert got == pytest.approx(expected)


def test_over_hosts_the_formula_is_an_upper_bound(simulate):
    for ranks, each in ((6, 2), (12, 4), (11, 4), (7, 1)):
        machine = simulate.Machine.of(ranks, each, COSTS)
        for schedule in cost_model.SCHEDULES:
            got = max(simulate.scan(schedule, machine, state=100.0, decay=1.0, blocks=4))
            expected = cost_model.seconds(schedule, COSTS, machine.hosts, 100.0, 1.0, 4)
            assert 0.5 * expected < got <= expected + 1e-9, (schedule, ranks, each)


@pytest.mark.parametrize("schedule", cost_model.SCHEDULES)
def test_every_rank_waits_for_those_before_it_only(simulate, schedule):
    machine = simulate.Machine.of(6, 2, COSTS)
    usual = simulate.scan(schedule, machine, state=100.0, decay=1.0, blocks=2)
    late = simulate.scan(schedule, machine, [0, 0, 0, 1000, 0, 0], state=100.0, decay=1.0, blocks=2)
    if schedule != "lasp2":
        assert late[:3] == usual[:3]
    assert all(time > 1000 for time in late[4:])
    assert simulate.scan(schedule, simulate.Machine.of(1), [7.0]) == [7.0]


def test_all_to_all(simulate):
    machine = simulate.Machine.of(4, 2, COSTS)
    # a part of 10 bytes: one message inside, two outside of the host
    assert simulate.all_to_all(machine, [0.0, 1.0, 0.0, 0.0], 40.0) == [1 + 40 + 40] * 4


def test_a_step(simulate):
    forward, backward = simulate.Layer.of(1.0, 2.0), simulate.Layer.of(2.0, 4.0)
    alone = simulate.step("none", simulate.Machine.of(1), forward, backward, 16)
    assert alone == pytest.approx(simulate.LAYERS * 9.0)
    assert simulate.step("all_scan", simulate.Machine.of(1), forward, backward, 16) == pytest.approx(alone)
    costs = LinkCosts(LinkCost(1e-3, 0.0, 0.0, "given"), LinkCost(1e-3, 0.0, 0.0, "given"))
    machine = simulate.Machine.of(4, 4, costs)
    assert simulate.step("all_scan", machine, forward, backward, 16) == pytest.approx(alone)  # hidden
    slow = LinkCosts(LinkCost(10.0, 0.0, 0.0, "given"), LinkCost(10.0, 0.0, 0.0, "given"))
    machine = simulate.Machine.of(2, 2, slow)
    # the second rank runs late once, by what its first scan leaves uncovered, not once a layer
    both = simulate.step("all_scan", machine, forward, backward, 16)
    assert both == pytest.approx(alone + (10 - 0.3) + (10 - 0.6))


def test_it_is_near_what_was_measured(simulate):
    found = simulate.checks()
    assert {(2, simulate.STATE), (2, 16 * simulate.MIB)} <= {(row["ranks"], row["bytes"]) for row in found}
    # two sizes in nine are a fifth off the line through all
    assert all(abs(row["error"]) < 0.21 for row in found)


def test_crossings(simulate):
    times = {
        "all_scan": {2: 1.0, 4: 2.0, 8: 4.0},
        "all_scan_tree": {2: 2.0, 4: 1.9, 8: 2.0},
        "two_level": {2: 2.0, 4: 3.0, 8: 3.0},
    }
    assert simulate.crossings(times) == {
        "all_scan_tree before all_scan": 4,
        "two_level before all_scan": 8,
        "two_level before all_scan_tree": None,
    }


def test_the_results_that_are_kept_are_of_these_inputs(simulate):
    kept = json.loads((simulate.RESULTS / "simulation.json").read_text())
    assert kept["inputs"] == simulate.INPUTS
    for row, now in zip(kept["checks"], simulate.checks(), strict=True):
        assert row == pytest.approx(now)
