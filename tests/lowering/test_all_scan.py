"""Every scan algorithm against the sequential scan, on real processes; and the bytes it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from zeco_compile.lowering import all_scan, communicator, volume
from zeco_compile.lowering.errors import InvalidSchedule

SCHEDULES = sorted(all_scan.ALGORITHMS)


def zeco():
    """torch.ops.zeco. Functions that go to another process by value cannot say ``torch.ops`` themselves."""
    import torch as imported

    return imported.ops.zeco


def _case(seed: int, world_size: int, width: int, with_boundary: bool, sizes: tuple[int, ...]):
    draw = torch.Generator().manual_seed(seed)
    batch, heads, key_dim, _ = sizes
    states = torch.randn(world_size, *sizes, generator=draw, dtype=torch.float64)
    decays = -torch.rand(world_size, batch, heads, key_dim if width else 1, generator=draw).double()
    boundary = torch.randn(sizes, generator=draw, dtype=torch.float64) if with_boundary else None
    return states, decays, boundary


def _sequential(states, decays, boundary, reverse: bool):
    order = list(range(len(states)))
    if reverse:
        order.reverse()
    state_in = torch.zeros_like(states[0]) if boundary is None else boundary
    out = [state_in] * len(states)
    for rank in order:
        out[rank] = state_in
        state_in = decays[rank].exp().unsqueeze(-1) * state_in + states[rank]
    return out


def _errors(rank: int, cases: list[tuple]) -> list[tuple[float, int, str]]:
    """Largest error and bytes sent by this rank, for each case, all in flight together."""
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    ops = zeco()
    data = communicator.communicator_for(name, torch.device("cpu"))
    one_host = data.links.hosts
    started: list[tuple] = []
    errors = []

    def finish() -> None:
        for token, state, decay, expected in started:
            got = ops.scan_wait(token, state, decay, name)
            assert got.is_contiguous()
            errors.append(float((got - expected[rank]).abs().max()))
        started.clear()

    for case in cases:
        schedule, blocks, reverse, seed, width, with_boundary, sizes, hosts = case
        states, decays, boundary = _case(seed, dist.get_world_size(), width, with_boundary, sizes)
        if hosts is not None and hosts != data.links.hosts:
            finish()  # a scan reads the hosts while it runs
            data.links = replace(data.links, hosts=hosts)
        token = ops.scan_start(states[rank], decays[rank], boundary, reverse, schedule, blocks, name)
        started.append((token, states[rank], decays[rank], _sequential(states, decays, boundary, reverse)))
    finish()
    # bytes, one case at a time
    sent = []
    for schedule, blocks, reverse, seed, width, with_boundary, sizes, hosts in cases:
        states, decays, boundary = _case(seed, dist.get_world_size(), width, with_boundary, sizes)
        if hosts is not None:
            data.links = replace(data.links, hosts=hosts)
        volume.reset()
        token = ops.scan_start(states[rank], decays[rank], boundary, reverse, schedule, blocks, name)
        ops.scan_wait(token, states[rank], decays[rank], name)
        sent.append(sum(volume.sent().values()))
    data.links = replace(data.links, hosts=one_host)
    return list(zip(errors, sent, strict=True))


def _layouts(world_size: int) -> list[tuple[int, ...]]:
    """Hosts of the ranks: one, two each, one each, unequal, and taking turns."""
    ranks = range(world_size)
    found = [
        tuple(0 for _ in ranks),
        tuple(rank // 2 for rank in ranks),
        tuple(ranks),
        tuple(min(rank // 3, 1) + rank // 5 for rank in ranks),
        tuple(rank % 2 for rank in ranks),
    ]
    return list(dict.fromkeys(found))


def _all_cases(world_size: int) -> list[tuple]:
    sizes = [(1, 1, 1, 1), (2, 3, 5, 4), (1, 2, 8, 3)] if world_size <= 4 else [(2, 3, 5, 4)]
    return [
        (schedule, blocks, reverse, seed, width, with_boundary, size, hosts)
        for seed, size in enumerate(sizes)
        for schedule in SCHEDULES
        for hosts in (_layouts(world_size) if schedule == "two_level" else (None,))
        for blocks in {"all_scan": (1, 2, 3, 100), "two_level": (1, 3)}.get(schedule, (0,))
        for reverse in (False, True)
        for width in (0, 1)
        for with_boundary in (False, True)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
def test_equal_to_the_sequential_scan_and_bytes_as_computed(ranks, fresh_ranks, world_size):
    cases = _all_cases(world_size)
    pool = ranks(world_size) if world_size <= 4 else fresh_ranks(world_size)
    out = pool.run(_errors, cases)
    for number, case in enumerate(cases):
        schedule, _, reverse, _, width, _, (batch, heads, key_dim, value_dim), hosts = case
        size = volume.LayerSize(
            batch=batch,
            length=1,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            decay_width=key_dim if width else 1,
            value_bytes=8,
            state_bytes=8,
        )
        for rank in range(world_size):
            error, sent = out[rank][number]
            assert error <= 1e-12, (case, rank, error)
            place = world_size - 1 - rank if reverse else rank
            seen = hosts[::-1] if hosts is not None and reverse else hosts
            assert sent == volume.schedule_bytes(schedule, size, place, world_size, seen), (case, rank)
            if schedule in ("all_scan", "lasp1"):
                assert sent == (size.state if place < world_size - 1 else 0), (case, rank)


def _different_dtypes(rank: int) -> list[float]:
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    out = []
    for dtype in (torch.float32, torch.float64):
        state = torch.full((1, 1, 4, 2), float(rank + 1), dtype=dtype)
        decay = torch.full((1, 1, 4), -1.0, dtype=dtype)
        # strided inputs, and a boundary of another dtype
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
        boundary = torch.ones(1, 1, 4, 2, dtype=torch.bfloat16)
        token = zeco().scan_start(state, decay, boundary, False, "all_scan", 2, name)
        got = zeco().scan_wait(token, state, decay, name)
        assert got.dtype == dtype
        expected = torch.ones(1, dtype=dtype)
        for earlier in range(rank):
            expected = torch.exp(torch.tensor(-1.0, dtype=dtype)) * expected + earlier + 1
        out.append(float((got - expected).abs().max()))
    return out


def test_dtypes_and_strides(ranks):
    for single, double in ranks(3).run(_different_dtypes):
        assert single < 1e-6
        assert double < 1e-14


def _caller_reuses_its_memory(rank: int) -> float:
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    import time

    state, decay = torch.full((1, 1, 64, 64), float(rank + 1)), torch.zeros(1, 1, 64)
    if rank == 0:
        time.sleep(0.2)  # so that the others' scans are still in flight when they overwrite their state
    token = zeco().scan_start(state, decay, None, False, "all_scan", 4, name)
    kept = state.clone()
    state.fill_(float("nan"))
    got = zeco().scan_wait(token, kept, decay, name)
    return float((got - sum(range(1, rank + 1))).abs().max())


def test_start_copies_what_it_sends(ranks):
    assert ranks(4).run(_caller_reuses_its_memory) == [0.0] * 4


def test_names():
    for name in (*SCHEDULES, "auto"):
        assert all_scan.check_schedule(name) == name
    known = "all_scan, all_scan_tree, lasp1, lasp2, two_level, or 'auto'"
    with pytest.raises(InvalidSchedule, match=f"'fastest'.*{known}"):
        all_scan.check_schedule("fastest")
    with pytest.raises(InvalidSchedule):
        zeco().scan_start(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), None, False, "fastest", 0, "")


def test_a_communicator_is_not_made_for_one_rank():
    before = dict(communicator._registry._entries)  # of the tests before this one, in this process
    token = zeco().scan_start(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2), None, False, "lasp2", 0, "")
    got = zeco().scan_wait(token, torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2), "")
    assert (got == 0).all()
    assert communicator._registry._entries == before
