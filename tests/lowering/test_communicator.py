"""Communicators: sub-groups of the world, several groups, order, bytes, a neighbour that dies."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeco_compile.lowering import communicator, groups, volume
from zeco_compile.lowering.errors import CommunicatorUnavailable, GroupNotFound, NeighbourLost

CPU = torch.device("cpu")


def zeco():
    """torch.ops.zeco. Functions that go to another process by value cannot say ``torch.ops`` themselves."""
    import torch as imported

    return imported.ops.zeco


def _world() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def _collectives(rank: int) -> dict[str, Any]:
    comm = communicator.communicator_for(_world(), CPU)
    size = comm.world_size
    volume.reset()
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        value = torch.tensor([[rank % 2, 1], [rank // 2, 0]]).to(dtype)
        rows = comm.run("gather", lambda link, value=value: link.all_gather(value))
        expected = [torch.tensor([[r % 2, 1], [r // 2, 0]]).to(dtype) for r in range(size)]
        out[f"gather {dtype}"] = torch.equal(rows, torch.stack(expected))
        spread = comm.run("spread", lambda link, value=value: link.broadcast(value.clone(), size - 1))
        out[f"spread {dtype}"] = torch.equal(spread, expected[size - 1])
    backwards = comm.run("gather", lambda link: link.all_gather(torch.tensor([rank])), reverse=True)
    out["reversed"] = backwards.flatten().tolist() == list(reversed(range(size)))
    mine = torch.arange(size * 2.0).view(size, 2) + rank
    out["sum"] = torch.equal(
        comm.run("sum", lambda link: link.all_reduce(mine.clone())),
        size * torch.arange(size * 2.0).view(size, 2) + sum(range(size)),
    )
    out["max"] = torch.equal(
        comm.run("max", lambda link: link.all_reduce(mine.clone(), "max")),
        torch.arange(size * 2.0).view(size, 2) + size - 1,
    )
    part = comm.run("scatter", lambda link: link.reduce_scatter(mine))
    out["scatter"] = torch.equal(part, size * torch.arange(size * 2.0).view(size, 2)[rank] + sum(range(size)))
    texts = communicator.control_communicator(_world()).run(
        "texts", lambda link: link.all_gather_bytes(b"x" * (3 * rank))
    )
    out["texts"] = texts == [b"x" * (3 * r) for r in range(size)]
    out["counted"] = volume.sent()["scatter"] == (size - 1) * 8 if size > 1 else True
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(ranks, world_size):
    for out in ranks(world_size).run(_collectives):
        assert all(out.values()), out


def _shift(link: communicator.Link, value: int) -> int:
    """The value of the rank before, -1 on the first."""
    arrived = torch.tensor([-1])
    sends = [(link.rank + 1, torch.tensor([value]))] if link.rank + 1 < link.world_size else []
    link.post(sends, [(link.rank - 1, arrived)] if link.rank else []).wait()
    link.flush()
    return int(arrived)


def _groups(rank: int) -> dict[str, Any]:
    # Overlapping groups, made in an order in which the ranks know different numbers of groups.
    made = {name: dist.new_group(members) for name, members in {"odd": [1, 3], "late": [0, 2, 3]}.items()}
    out: dict[str, Any] = {}
    for name, group in made.items():
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        comm = communicator.communicator_for(group.group_name, CPU)
        where = groups.members(group.group_name)
        out[name] = where.rank, where.global_ranks, comm.run("shift", lambda link: _shift(link, rank))
    world = communicator.communicator_for(_world(), CPU)
    out["world"] = world.run("shift", lambda link: _shift(link, rank))
    out["world reversed"] = world.run("shift", lambda link: _shift(link, rank), reverse=True)
    # two groups at once
    jobs = []
    for _ in range(5):
        for group in (*made.values(), dist.group.WORLD):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                comm = communicator.communicator_for(group.group_name, CPU)
                jobs.append((comm, comm.submit("shift", lambda link: _shift(link, rank))))
    for comm, job in reversed(jobs):
        before = comm.rank - 1
        assert job.wait() == (comm.global_ranks[before] if before >= 0 else -1)
    return out


def test_sub_groups_of_the_world_and_overlapping_groups(ranks):
    out = ranks(4).run(_groups)
    assert [o["world"] for o in out] == [-1, 0, 1, 2]
    assert [o["world reversed"] for o in out] == [1, 2, 3, -1]
    assert out[1]["odd"] == (0, (1, 3), -1)
    assert out[3]["odd"] == (1, (1, 3), 1)
    assert out[0]["late"] == (0, (0, 2, 3), -1)
    assert out[2]["late"] == (1, (0, 2, 3), 0)
    assert out[3]["late"] == (2, (0, 2, 3), 2)


def _jobs_overlap_the_caller(rank: int) -> tuple[bool, int]:
    comm = communicator.communicator_for(_world(), CPU)
    if rank == 0:
        time.sleep(0.5)
    start = time.perf_counter()
    job = comm.submit("shift", lambda link: _shift(link, rank))
    returned_at_once = time.perf_counter() - start < 0.3
    return returned_at_once, job.wait()


def test_submit_does_not_wait_for_the_neighbour(ranks):
    assert ranks(2).run(_jobs_overlap_the_caller) == [(True, -1), (True, 0)]


def _error_in_a_job(rank: int) -> tuple[str, int]:
    comm = communicator.communicator_for(_world(), CPU)
    job = comm.submit("broken", lambda link: [][0])
    try:
        job.wait()
        text = "nothing raised"
    except IndexError:
        text = "IndexError"
    return text, comm.run("shift", lambda link: _shift(link, rank))


def test_an_error_inside_a_job_is_raised_by_wait_and_the_worker_goes_on(ranks):
    assert ranks(2).run(_error_in_a_job) == [("IndexError", -1), ("IndexError", 0)]


def _bad_posts(rank: int) -> list[str]:
    comm = communicator.communicator_for(_world(), CPU)
    out = []
    for sends in ([(comm.rank, torch.zeros(1))], [(7, torch.zeros(1))], [(1 - rank, torch.zeros(2, 2).t())]):
        try:
            comm.run("bad", lambda link, sends=sends: link.post(sends))
        except ValueError as error:
            out.append(str(error))
    return out


def test_bad_posts_are_refused(ranks):
    for itself, unknown, strided in ranks(2).run(_bad_posts):
        assert "no peer" in itself
        assert "no peer" in unknown
        assert "contiguous" in strided


def test_groups_that_do_not_exist():
    assert groups.members("") == groups.Members(0, 1, (0,))
    with pytest.raises(GroupNotFound, match="no process group named 'gone'"):
        groups.members("gone")
    with pytest.raises(GroupNotFound):
        communicator.communicator_for("gone", CPU)
    with pytest.raises(CommunicatorUnavailable, match="meta"):
        communicator.communicator_for("gone", torch.device("meta"))


def _destroyed_and_made_again(rank: int, folder: str) -> list[int]:
    out = []
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        out.append(
            communicator.communicator_for(_world(), CPU).run("shift", lambda link: _shift(link, rank + 5))
        )
    return out


def test_a_group_that_is_destroyed_and_made_again(fresh_ranks, tmp_path):
    pool = fresh_ranks(2)
    pool.run(_collectives)
    assert pool.run(_destroyed_and_made_again, str(tmp_path)) == [[-1, -1], [5, 5]]


def _connect(rank: int) -> None:
    communicator.communicator_for(_world(), CPU).run("shift", lambda link: _shift(link, rank))


def _scan_beside_the_dead(rank: int, schedule: str, reverse: bool) -> tuple[float, str, Any, Any, str]:
    ops = zeco()
    state, log_decay = torch.ones(1, 2, 8, 4), torch.zeros(1, 2, 8)
    start = time.perf_counter()
    try:
        # A send can still fit into the dead rank's socket; the next ones cannot.
        for _ in range(3):
            token = ops.scan_start(state, log_decay, None, reverse, schedule, 2, _world())
            ops.scan_wait(token, state, log_decay, _world())
            token = ops.scan_start(state, log_decay, None, not reverse, schedule, 2, _world())
            ops.scan_wait(token, state, log_decay, _world())
    except NeighbourLost as error:
        took = time.perf_counter() - start
        try:
            ops.scan_start(state, log_decay, None, reverse, schedule, 2, _world())
        except NeighbourLost as again:
            return took, str(error), error.neighbour, error.neighbour_global, str(again)
    return time.perf_counter() - start, "not noticed", None, None, ""


@pytest.mark.parametrize("schedule", ["all_scan", "all_scan_tree", "lasp2"])
def test_a_killed_neighbour_is_noticed_by_every_survivor(fresh_ranks, schedule):
    pool = fresh_ranks(4, timeout_seconds=30.0)
    pool.run(_connect)
    pool.kill(1)
    out = pool.run(_scan_beside_the_dead, schedule, False, ranks=[0, 2, 3])
    for rank in (0, 2, 3):
        took, text, neighbour, neighbour_global, again = out[rank]
        assert took < 10, f"rank {rank}: {took} s"
        assert text.startswith("Lost a neighbour in scan"), f"rank {rank}: {text}"
        assert again.startswith("Lost a neighbour in scan"), "the next use is refused at once"
        if schedule == "all_scan":
            assert neighbour == neighbour_global
            assert neighbour in {0: {1}, 2: {1, 3}, 3: {2}}[rank]
            assert f"(global rank {neighbour})" in text


def _silent(rank: int) -> tuple[float, str]:
    if rank == 0:
        return 0.0, ""
    start = time.perf_counter()
    try:
        communicator.communicator_for(_world(), CPU).run("shift", lambda link: _shift(link, rank))
    except NeighbourLost as error:
        return time.perf_counter() - start, str(error)
    return 0.0, "not noticed"


def test_a_silent_neighbour_is_lost_after_the_groups_timeout(fresh_ranks):
    pool = fresh_ranks(2, timeout_seconds=2.0)
    pool.run(_connect)
    took, text = pool.run(_silent)[1]
    assert 1.5 < took < 10
    assert "receiving from group rank 0 (global rank 0)" in text


def _alone(rank: int) -> tuple[float, str]:
    if rank == 0:
        return 0.0, ""
    start = time.perf_counter()
    try:
        communicator.communicator_for(_world(), CPU)
    except CommunicatorUnavailable as error:
        return time.perf_counter() - start, str(error)
    return 0.0, "not noticed"


def test_a_rank_that_never_connects(fresh_ranks):
    took, text = fresh_ranks(2, timeout_seconds=2.0).run(_alone)[1]
    assert took < 15
    assert "Could not connect the 2 ranks" in text


def test_neighbour_lost_travels_between_processes():
    import pickle

    error = NeighbourLost(
        "scan", rank=2, direction="sending to", neighbour=3, neighbour_global=7, cause="closed"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.neighbour_global == 7
