"""All ranks know the same of what connects them, and the file of measured costs is read and written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeco_compile import tune
from zeco_compile.lowering import cost_model, links, volume
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.cost_model import LinkCost
from zeco_compile.lowering.errors import InvalidLinkCosts

FAST, SLOW = LinkCost(1e-6, 1e-12, 0.0, "measured here"), LinkCost(1.0, 1.0, 1.0, "measured elsewhere")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zeco_compile" / "links.json"


def test_file(cache):
    assert links.measured_costs(4) == {}
    assert links.save("gloo", 4, FAST, None) == cache
    assert links.save("gloo", 8, FAST, SLOW) == cache
    known = links.assumed(4).costs
    assert known["gloo"].intra == FAST
    assert known["gloo"].inter == cost_model.DEFAULTS["gloo"].inter
    assert known["nccl"] == cost_model.DEFAULTS["nccl"]
    assert links.assumed(8).costs["gloo"].inter == SLOW
    assert links.assumed(2).costs["gloo"] == cost_model.DEFAULTS["gloo"]
    assert [path.name for path in cache.parent.iterdir()] == ["links.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"intra": {"latency": -1}}}', '{"a": 3}'])
def test_a_file_that_is_none(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.raises(InvalidLinkCosts, match=r"links\.json .* Delete it, and measure again"):
        links.assumed(2)


def test_hosts_of_a_report(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert links.assumed(3).hosts == (0, 0, 0)
    assert links.assumed(5, 2).hosts == (0, 0, 1, 1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert links.assumed(8).hosts == (0, 0, 0, 0, 1, 1, 1, 1)


def _known(rank: int, folder: str, text: str) -> tuple:
    """What this rank knows of a new group, on hosts of two, where every rank's file says something else."""
    os.environ["XDG_CACHE_HOME"], os.environ["NCCL_HOSTID"] = f"{folder}/{rank}", f"host {rank // 2}"
    try:
        if text:
            path = links.cache_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            links.save("gloo", dist.get_world_size(), LinkCost(rank + 1.0, 1.0, 0.0, f"rank {rank}"), None)
        group = dist.new_group(backend="gloo").group_name
        known = links.of_group(group)
        assert links.of_group(group) is known
        data = communicator_for(group, torch.device("cpu"))
        plan = data.plan(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4), "auto", 0)
        order = data.run("order", lambda link: link.hosts, reverse=True)
        return known.hosts, known.costs["gloo"].intra.source, order, (plan.schedule, plan.blocks)
    finally:
        del os.environ["XDG_CACHE_HOME"], os.environ["NCCL_HOSTID"]


def test_all_ranks_know_what_rank_0_knows(ranks, tmp_path):
    out = ranks(3).run(_known, str(tmp_path), "")
    assert out == [out[0]] * 3
    assert out[0][:3] == ((0, 0, 1), "rank 0", (1, 0, 0))


def test_a_bad_file_of_rank_0_is_raised_everywhere(ranks, tmp_path):
    out = ranks(2).run(_known, str(tmp_path), "{", errors=True)
    assert all(isinstance(error, InvalidLinkCosts) for error in out)
    assert "on rank 0" in str(out[1])


def _measured(rank: int) -> list[tune.Measured]:
    world = dist.group.WORLD
    assert world is not None
    try:
        return tune.measure(world.group_name, torch.device("cpu"), (4096, 1 << 20), repeats=3)
    finally:
        volume.reset()


def test_measuring(ranks):
    out = ranks(3).run(_measured)
    assert out == [out[0]] * 3
    (inside,) = out[0]  # all on one host
    assert (inside.where, inside.ranks) == ("intra", (0, 1))
    assert [size for size, _ in inside.times] == [4096, 1 << 20]
    assert inside.cost.latency + inside.cost.per_byte > 0
    assert inside.cost.gap <= inside.cost.latency
