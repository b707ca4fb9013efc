"""The arithmetic of the cost model, against formulas written out and against what was measured."""

from __future__ import annotations

import math

import pytest

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCost, LinkCosts
from zeco_compile.lowering.errors import InvalidLinkCosts, InvalidSchedule

MIB = 1 << 20
FAST = LinkCost(5.0, 1.0, 5.0, "given")
SLOW = LinkCost(20.0, 2.0, 20.0, "given")
COSTS = LinkCosts(FAST, SLOW)


def one_host(world_size: int) -> tuple[int, ...]:
    return (0,) * world_size


def test_chain_with_a_gap_as_long_as_the_latency_is_the_papers_formula():
    for ranks, blocks in ((2, 1), (5, 1), (5, 4), (64, 16)):
        expected = (ranks - 1 + blocks - 1) * (5.0 + 100 / blocks)
        assert cost_model.chain_seconds(COSTS, one_host(ranks), 100, blocks) == pytest.approx(expected)
    assert cost_model.seconds("all_scan", COSTS, (0,), 100, 1, 3) == 0.0


def test_chain_over_hosts_waits_for_its_slowest_link():
    # hops: fast, slow, fast; three blocks of 10 bytes
    expected = 2 * (5 + 10) + (20 + 2 * 10) + 2 * (20 + 2 * 10)
    assert cost_model.chain_seconds(COSTS, (0, 0, 1, 1), 30, 3) == pytest.approx(expected)
    no_gap = LinkCosts(LinkCost(5.0, 1.0, 0.0, "given"), SLOW)
    assert cost_model.chain_seconds(no_gap, one_host(3), 30, 3) == pytest.approx(2 * 15 + 2 * 10)


def test_the_other_schedules():
    # a shift and rounds at distance 1, 2, 4 among ranks 1 to 7
    assert cost_model.tree_seconds(COSTS, one_host(8), 100, 10) == pytest.approx(4 * 115)
    assert cost_model.tree_seconds(COSTS, one_host(2), 100, 10) == pytest.approx(115)
    # hosts of 2: the shift and the rounds at distances 1, 2 cross hosts
    assert cost_model.tree_seconds(COSTS, (0, 0, 1, 1), 100, 10) == pytest.approx(3 * 240)
    assert cost_model.gather_seconds(COSTS, one_host(4), 100) == pytest.approx(3 * 105)
    inside = cost_model.chain_seconds(COSTS, one_host(4), 100, 5)
    two = cost_model.two_level_seconds(COSTS, (0, 0, 0, 0, 1, 1), 100, 10, 5)
    assert two == pytest.approx(2 * inside + 3 * 10 + 240)
    assert cost_model.two_level_seconds(COSTS, one_host(4), 100, 10, 5) == pytest.approx(inside)
    alone = tuple(range(8))
    tree = cost_model.tree_seconds(COSTS, alone, 100, 10)
    assert cost_model.two_level_seconds(COSTS, alone, 100, 10, 5) == pytest.approx(tree)
    with pytest.raises(InvalidSchedule, match="'auto' to predict: use one of all_scan, all_scan_tree"):
        cost_model.seconds("auto", COSTS, (0, 0), 1, 1, 1)


def test_blocks():
    costs = LinkCosts(LinkCost(1.0, 1.0, 1.0, "given"), SLOW)
    # (P - 2 + n) * (1 + S/n) is least at sqrt(S * (P - 2))
    assert abs(cost_model.best_blocks("all_scan", costs, one_host(10), 200, 1, 1000) - 40) <= 12
    assert cost_model.best_blocks("all_scan", costs, one_host(10), 200, 1, 3) == 3
    assert cost_model.best_blocks("all_scan", costs, one_host(2), 200, 1, 128) == 1
    assert cost_model.best_blocks("all_scan_tree", costs, one_host(10), 200, 1, 128) == 1
    assert cost_model.plan(costs, one_host(4), 200, 1, 3, "all_scan", 100).blocks == 3
    assert cost_model.plan(costs, one_host(4), 200, 1, 128, "all_scan", 2).blocks == 2


def test_auto_takes_the_fastest():
    def chosen(ranks: int, state: int, costs: LinkCosts = COSTS, each: int = 4096) -> str:
        hosts = tuple(rank // each for rank in range(ranks))
        return cost_model.plan(costs, hosts, state, 1, 128).schedule

    assert chosen(2, 10) == "all_scan"  # of equals, the one that sends least
    assert chosen(8, 1) == "all_scan_tree"
    assert chosen(8, 100000) == "all_scan"
    far = LinkCosts(LinkCost(0.1, 0.001, 0.1, "given"), LinkCost(1000.0, 1.0, 1000.0, "given"))
    assert chosen(64, 100, far, 8) == "two_level"
    plan = cost_model.plan(far, tuple(rank // 8 for rank in range(64)), 100, 1, 128)
    assert plan.seconds == min(
        cost_model.plan(far, tuple(rank // 8 for rank in range(64)), 100, 1, 128, name).seconds
        for name in cost_model.SCHEDULES
    )


@pytest.mark.parametrize(
    ("size", "microseconds"),
    [(MIB // 16, 5.2), (MIB // 2, 6.4), (MIB, 7.1), (4 * MIB, 16.8), (8 * MIB, 28.9), (16 * MIB, 52.2)],
)
def test_default_of_symmetric_memory_predicts_the_measured_scans(size, microseconds):
    predicted = cost_model.plan(cost_model.DEFAULTS["symmetric"], one_host(2), size, size // 128, 128)
    assert predicted.schedule == "all_scan"
    assert predicted.seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


def test_fit():
    exact = cost_model.fit([(0, 5.0), (10, 15.0), (100, 105.0)], 2.0)
    assert (exact.latency, exact.per_byte, exact.gap) == (pytest.approx(5), pytest.approx(1), 2.0)
    assert exact.spread < 1e-12
    assert cost_model.fit([(0, 5.0), (10, 15.0)]).gap == pytest.approx(5)
    flat = cost_model.fit([(0, 5.0), (10, 4.0)])
    assert flat.per_byte == 0.0
    assert 4.0 <= flat.latency <= 5.0
    assert 0.0 < flat.spread < 0.2
    for bad in ([(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)]):
        with pytest.raises(InvalidLinkCosts, match="two sizes"):
            cost_model.fit(bad)
    for value in (-1.0, math.nan, "1"):
        with pytest.raises(InvalidLinkCosts, match="latency of a link"):
            LinkCost(value, 0.0, 0.0, "given")


def test_runs_of_hosts():
    assert cost_model.runs((0, 0, 1, 1, 1, 0)) == [range(2), range(2, 5), range(5, 6)]
    assert cost_model.runs((3,)) == [range(1)]


def test_hiding_pays_where_the_chain_is_long_and_the_slice_is_short():
    rows = 16384 * 16  # 16k tokens, 16 heads
    longest_not_worth_it = {"per channel": 20, "per head": 5}
    for gate, ranks in longest_not_worth_it.items():
        assert not cost_model.worth_hiding(2, rows, gate == "per channel")
        assert not cost_model.worth_hiding(ranks, rows, gate == "per channel")
        assert cost_model.worth_hiding(ranks + 1, rows, gate == "per channel")
        assert not cost_model.worth_hiding(ranks + 1, 2 * rows, gate == "per channel")
