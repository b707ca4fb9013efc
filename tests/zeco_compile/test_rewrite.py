"""What a report says of how states travel, for wires and hosts that are not here."""

from __future__ import annotations

import pytest

from zeco_compile.lowering import cost_model, symmetric
from zeco_compile.lowering.links import GroupLinks
from zeco_compile.passes.locations import UNKNOWN
from zeco_compile.passes.plans import Ranks
from zeco_compile.passes.report import Region, Report
from zeco_compile.rewrite import report_scans
from zeco_compile.settings import Settings

MIB = 1 << 20
ONE_HOST, TWO_HOSTS = (0, 0, 0, 0), (0, 0, 1, 1)
# a state of 1 MiB
NAMES = ("B", "T", "H", "K", "V", "decay width", "bytes of v", "bytes of the state")
SIZES = dict(zip(NAMES, (1, 64, 16, 128, 128, 128, 2, 4), strict=True))


def reported(wire: str, hosts: tuple[int, ...], **options) -> Report:
    region = Region("gla_0", "per channel", "by meaning", UNKNOWN, sizes=dict(SIZES))
    report = Report(regions=[region])
    report_scans(report, Settings.parse(options), Ranks("group", 1, len(hosts)), GroupLinks(hosts), wire)
    return report


@pytest.mark.parametrize("schedule", symmetric.SCHEDULES)
def test_gpus_of_one_host_share_memory(schedule):
    pytest.importorskip("triton")
    report = reported("nccl", ONE_HOST, schedule=schedule, blocks=2)
    (scan,) = report.scans
    assert (scan.wire, scan.schedule, scan.hosts) == ("symmetric", "all_scan", 1)
    assert scan.blocks == 128  # tiles of 2048 elements, not what was asked for
    costs = cost_model.DEFAULTS["symmetric"]
    assert scan.seconds == cost_model.chain_seconds(costs, ONE_HOST, MIB, 128)
    assert [each.bytes_per_call for each in report.communication] == [MIB, MIB]


@pytest.mark.parametrize(
    ("wire", "hosts", "schedule", "switch"),
    [
        ("nccl", TWO_HOSTS, "all_scan", "1"),
        ("nccl", ONE_HOST, "two_level", "1"),
        ("nccl", ONE_HOST, "all_scan", "0"),
        ("gloo", ONE_HOST, "all_scan", "1"),
    ],
)
def test_else_the_wire_carries_what_was_asked_for(monkeypatch, wire, hosts, schedule, switch):
    monkeypatch.setenv(symmetric.SWITCH, switch)
    (scan,) = reported(wire, hosts, schedule=schedule, blocks=2).scans
    assert (scan.wire, scan.schedule, scan.blocks) == (wire, schedule, 2)
    expected = cost_model.seconds(schedule, cost_model.DEFAULTS[wire], hosts, MIB, MIB // 128, 2)
    assert scan.seconds == pytest.approx(expected)
