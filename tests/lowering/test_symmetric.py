"""All-Scan through shared memory, as a chain of virtual ranks: in the interpreter, or on a GPU where one is.

Real ranks: tests/cuda/check_all_scan.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from zeco_compile.kernels import triton_scan
from zeco_compile.lowering import symmetric

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def problem(ranks, sizes, width, dtype=torch.float32, seed=0):
    """states, decays of each rank, what enters, and S_in of each rank by the sequential scan."""
    draw = torch.Generator().manual_seed(seed)
    batch, heads, key, _ = sizes
    states = torch.randn(ranks, *sizes, generator=draw, dtype=dtype).to(DEVICE)
    decays = -torch.rand(ranks, batch, heads, key if width else 1, generator=draw, dtype=dtype).to(DEVICE)
    boundary = torch.randn(sizes, generator=draw, dtype=dtype).to(DEVICE)
    expected, carried = [], boundary.clone()
    for state, decay in zip(states, decays, strict=True):
        expected.append(carried)
        carried = decay.exp().unsqueeze(-1) * carried + state
    return states, decays, boundary, expected


def no_failure() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")


def scan(hops, states, decays, boundary, seconds=5.0):
    # in the order of the ranks: the interpreter runs a rank to its end, and one stream would too
    return [
        hop.run(state, decay, boundary if rank == 0 else None, seconds)
        for rank, (hop, state, decay) in enumerate(zip(hops, states, decays, strict=True))
    ]


@pytest.mark.parametrize(
    ("sizes", "width"),
    [((1, 2, 16, 8), True), ((2, 1, 3, 5), False), ((1, 1, 1, 1), True), ((1, 3, 40, 256), True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_chain_is_the_sequential_scan(sizes, width, dtype):
    # several scans one after the other, more than the inbox has places, each with its own numbers
    ranks = 4
    first = problem(ranks, sizes, width, dtype)
    shape = symmetric.shape_of(first[0][0], first[1][0])
    failure = no_failure()
    hops = list(symmetric.virtual_chain([DEVICE] * ranks, shape, failure))
    for seed in range(2 * symmetric.SLOTS + 1):
        states, decays, boundary, expected = problem(ranks, sizes, width, dtype, seed)
        got = scan(hops, states, decays, boundary)
        for rank in range(ranks):
            torch.testing.assert_close(got[rank], expected[rank], rtol=1e-5, atol=1e-5)
    assert int(failure[0]) == 0


def test_nothing_enters_the_first_rank():
    states, decays, _, _ = problem(3, (1, 2, 4, 8), True)
    hops = list(symmetric.virtual_chain([DEVICE] * 3, symmetric.shape_of(states[0], decays[0]), no_failure()))
    got = scan(hops, states, decays, None)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    torch.testing.assert_close(got[1], states[0])


def test_a_rank_may_be_ahead_by_as_many_states_as_there_is_room_for():
    states, decays, boundary, _ = problem(2, (1, 1, 4, 8), True)
    failure = no_failure()
    hops = list(symmetric.virtual_chain([DEVICE] * 2, symmetric.shape_of(states[0], decays[0]), failure))
    sent = [
        hops[0].run(states[0] + number, decays[0], boundary, 0.05) for number in range(symmetric.SLOTS + 1)
    ]
    synchronise()
    # the one that found no room says so, and sends no number
    assert int(failure[0]) == triton_scan.NOTHING_TAKEN
    assert all(torch.equal(each, boundary) for each in sent)


def test_who_waits_in_vain_says_so_and_passes_nothing_off_as_a_state():
    states, decays, _, _ = problem(3, (1, 1, 4, 8), True)
    shape = symmetric.shape_of(states[0], decays[0])
    failures = [no_failure() for _ in range(3)]
    hops = list(symmetric.virtual_chain([DEVICE] * 3, shape, failures[0]))
    for hop, failure in zip(hops, failures, strict=True):
        hop._failure = failure
    # the first rank never comes
    got = hops[1].run(states[1], decays[1], None, 0.05)
    then = hops[2].run(states[2], decays[2], None, 0.05)
    synchronise()
    assert [int(failure[0]) for failure in failures] == [
        0,
        triton_scan.NOTHING_ARRIVED,
        triton_scan.PASSED_ON,
    ]
    assert bool(got.isnan().all())
    assert bool(then.isnan().all())


def test_what_comes_after_a_failure_is_taken_for_nothing():
    states, decays, boundary, _ = problem(2, (1, 1, 4, 8), True)
    failure = no_failure()
    hops = list(symmetric.virtual_chain([DEVICE] * 2, symmetric.shape_of(states[0], decays[0]), failure))
    hops[1].run(states[1], decays[1], None, 0.05)
    for _ in range(symmetric.SLOTS):
        # late, into places that the second rank will look at again
        hops[0].run(states[0], decays[0], boundary, 0.05)
        got = hops[1].run(states[1], decays[1], None, 0.05)
        synchronise()
        assert bool(got.isnan().all())
    assert int(failure[0]) == triton_scan.NOTHING_ARRIVED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_nan_is_a_number_that_came(dtype):
    states, decays, boundary, _ = problem(3, (1, 1, 4, 8), True, dtype)
    patterns = states.view(torch.int32 if dtype == torch.float32 else torch.int64)
    # the pattern of what has not come
    patterns[0, 0, 0, 1] = triton_scan.ABSENT
    failure = no_failure()
    hops = list(symmetric.virtual_chain([DEVICE] * 3, symmetric.shape_of(states[0], decays[0]), failure))
    for got in scan(hops, states, decays, boundary)[1:]:
        assert bool(got[0, 0, 1].isnan().all())
        assert int(got.isnan().sum()) == 8
    assert int(failure[0]) == 0


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
