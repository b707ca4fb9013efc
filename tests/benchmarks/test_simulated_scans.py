"""Simulated scans agree with the cost model's formulas where these are exact."""

from __future__ import annotations

import pytest
from simulated_scans import Machine, all_to_all, scan

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCost, LinkCosts

COSTS = LinkCosts(LinkCost(5.0, 1.0, 5.0, "given"), LinkCost(20.0, 2.0, 20.0, "given"))


@pytest.mark.parametrize("schedule", cost_model.SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_on_one_host_it_is_the_formula(schedule, ranks):
    machine = Machine.of(ranks, ranks, COSTS)
    for blocks in (1, 4):
        got = max(scan(schedule, machine, state=100.0, decay=0.0, blocks=blocks))
        expected = cost_model.seconds(schedule, COSTS, machine.hosts, 100.0, 0.0, blocks)
        assert got == pytest.approx(expected)


def test_over_hosts_the_formula_is_an_upper_bound():
    for ranks, each in ((6, 2), (12, 4), (11, 4), (7, 1)):
        machine = Machine.of(ranks, each, COSTS)
        for schedule in cost_model.SCHEDULES:
            got = max(scan(schedule, machine, state=100.0, decay=1.0, blocks=4))
            expected = cost_model.seconds(schedule, COSTS, machine.hosts, 100.0, 1.0, 4)
            assert 0.5 * expected < got <= expected + 1e-9, (schedule, ranks, each)


@pytest.mark.parametrize("schedule", cost_model.SCHEDULES)
def test_every_rank_waits_for_those_before_it_only(schedule):
    machine = Machine.of(6, 2, COSTS)
    usual = scan(schedule, machine, state=100.0, decay=1.0, blocks=2)
    late = scan(schedule, machine, [0, 0, 0, 1000, 0, 0], state=100.0, decay=1.0, blocks=2)
    if schedule != "lasp2":
        assert late[:3] == usual[:3]
    assert all(time > 1000 for time in late[4:])
    assert scan(schedule, Machine.of(1), [7.0]) == [7.0]


def test_all_to_all():
    machine = Machine.of(4, 2, COSTS)
    # a part of 10 bytes: one message inside, two outside of the host
    assert all_to_all(machine, [0.0, 1.0, 0.0, 0.0], 40.0) == [1 + 40 + 40] * 4
