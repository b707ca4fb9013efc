"""The simulation beside what was measured, and the results that are kept."""

from __future__ import annotations

import json

import pytest
from paper_model import STATE
from simulate import INPUTS, MIB, checks, crossings
from simulated_steps import RESULTS


def test_it_is_near_what_was_measured():
    found = checks()
    assert {(2, STATE), (2, 16 * MIB)} <= {(row["ranks"], row["bytes"]) for row in found}
    # two sizes in nine are a fifth off the line through all
    assert all(abs(row["error"]) < 0.21 for row in found)


def test_crossings():
    times = {
        "all_scan": {2: 1.0, 4: 2.0, 8: 4.0},
        "all_scan_tree": {2: 2.0, 4: 1.9, 8: 2.0},
        "two_level": {2: 2.0, 4: 3.0, 8: 3.0},
    }
    assert crossings(times) == {
        "all_scan_tree before all_scan": 4,
        "two_level before all_scan": 8,
        "two_level before all_scan_tree": None,
    }


def test_the_results_that_are_kept_are_of_these_inputs():
    kept = json.loads((RESULTS / "simulation.json").read_text())
    assert kept["inputs"] == INPUTS
    for row, now in zip(kept["checks"], checks(), strict=True):
        assert row == pytest.approx(now)
