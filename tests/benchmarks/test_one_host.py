"""The summary of a host's measurements, from those of two GPUs that are kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from one_host import FOLDER, MIB, Line, markdown, operator_lines, scan_lines, summary
from simulated_steps import RESULTS


@pytest.fixture
def kept(tmp_path):
    """The kept results where a run on two ranks would have put its own."""
    for name in ("collectives", "sharded_operator", "gla_model"):
        (tmp_path / "2_ranks" / name).mkdir(parents=True)
        kept = (RESULTS / f"{name}_2xh200.json").read_text()
        (tmp_path / "2_ranks" / name / "results.json").write_text(kept)
    return tmp_path


def test_targets_and_predictions_stand_beside_what_was_measured(kept):
    lines = summary(2, kept / "2_ranks")
    whats = [line.what for line in lines]
    assert [w for w in whats if "MiB" in w] == [f"All-Scan of {n} MiB in a CUDA graph" for n in (1, 4)]
    assert len([w for w in whats if w.startswith("operator over")]) == 4
    model = lines[-1]
    assert model.what == "1B model, of data parallel"
    assert model.at_least
    rows = {
        row["schedule"]: row for row in json.loads((RESULTS / "gla_model_2xh200.json").read_text())["rows"]
    }
    share = rows["all_scan"]["tokens_a_second"] / rows["data parallel"]["tokens_a_second"]
    assert model.measured == pytest.approx(share)
    assert share < model.simulated <= 1


def test_a_scan_pays_a_hop_for_each_rank_but_one_and_the_state_once():
    row = {"way": "all_scan, symmetric memory", "how": "graph", "bytes": MIB, "us": 10.0}
    two, eight = (scan_lines(ranks, [{**row, "ranks": ranks}])[0] for ranks in (2, 8))
    assert eight.target - two.target == pytest.approx(1.5 * 2.0 * 6)
    assert eight.simulated > two.simulated
    assert scan_lines(8, [{**row, "ranks": 2}]) == []  # of another number of ranks
    assert scan_lines(2, [{**row, "ranks": 2, "how": "python"}]) == []


def test_an_operator_is_compared_with_its_own_size():
    rows = [
        {"gate": "channel", "tokens": 16384, "ranks": 8, "schedule": "unsharded", "us": 800.0, "over": 0.0},
        {"gate": "channel", "tokens": 16384, "ranks": 8, "schedule": "all_scan", "us": 840.0, "over": 0.05},
        {"gate": "channel", "tokens": 16384, "ranks": 8, "schedule": "lasp2", "us": 900.0, "over": 0.125},
    ]
    (line,) = operator_lines(8, rows)
    assert (line.measured, line.met) == (0.05, False)


def test_the_table_says_which_targets_are_met():
    lines = [
        Line(8, "a scan", "us", 10.0, 12.0, 9.0),
        Line(8, "a share", "", 0.96, 0.97, 0.99, at_least=True),
    ]
    assert [line.met for line in lines] == [True, False]
    assert markdown(lines).splitlines()[2:] == [
        "| 8 | a scan | 10.0 us | at most 12.0 us | yes | 9.0 us |",
        "| 8 | a share | 96.0 % | at least 97.0 % | no | 99.0 % |",
    ]


def test_the_command_sums_up_what_is_there(kept):
    command = [sys.executable, str(FOLDER / "one_host.py"), "--out", str(kept), "--ranks", "2", "--summary"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.strip() == (kept / "summary.md").read_text().strip()
    assert len(json.loads((kept / "summary.json").read_text())) == 7
