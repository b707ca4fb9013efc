"""The chunked kernels on one rank, against autograd through the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from zeco_compile.kernels import (
    InvalidShapes,
    backward,
    chunks,
    combine,
    combine_backward,
    diagonal,
    diagonal_backward,
    rank_dstate,
    rank_state,
)

GATES = ("zero", "zeros", "slow", "half", "five", "twenty", "mixed", "reset", "infinite", "gone", "positive")
ON_MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = ("o", "final state", "dq", "dk", "dv", "dg", "dstate_in")


def run(p):
    """[o, final state, dq, dk, dv, dg, dstate_in] of the chunked kernels."""
    state, log_decay = rank_state(p.k, p.v, p.g)
    o = diagonal(p.q, p.k, p.v, p.g, p.scale)
    decay = log_decay.exp().unsqueeze(-1)
    dstate_in = None
    if p.state is None:
        o = o.to(p.q.dtype)
    else:
        o = combine(o, p.q, p.g, p.state, p.scale)
        state = decay * p.state + state
        dstate_in = rank_dstate(p.q, p.g, p.do, p.scale)
        if p.dstate is not None:
            dstate_in = dstate_in + decay * p.dstate
    gradients = backward(p.q, p.k, p.v, p.g, p.do, p.scale, p.state, p.dstate)
    return [o, state, *gradients, dstate_in]


def errors(p, error):
    got = run(p)
    values, gradients = p.truth()
    truth = [*values, *gradients]
    assert [x is None for x in got] == [x is None for x in truth]
    return {
        name: error(a, b)
        for name, a, b in zip(NAMES, got, truth, strict=True)
        if a is not None and b is not None
    }


@ON_MANY
@given(data=st.data())
def test_equals_the_recurrence(make_problem, error, device, data):
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    p = make_problem(
        draw(st.integers(1, 2)),
        draw(st.one_of(st.integers(1, 9), st.integers(10, 150), st.sampled_from([31, 32, 33, 64, 65, 128]))),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3, 8, 48])),
        draw(st.sampled_from([1, 5, 16, 80])),
        draw(st.sampled_from(["none", "head", "channel", "channel"])),
        draw(st.sampled_from(GATES)),
        dtype=dtype,
        state=draw(st.booleans()),
        dstate=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        device=device,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MAX_CHUNK_ON_CPU", draw(st.sampled_from([32, 64, 128])))
        patch.setattr(chunks, "_SLICE_ON_CPU", draw(st.sampled_from([1, 1 << 12, 1 << 17])))
        found = errors(p, error)
    assert max(found.values()) <= (1e-10 if dtype == torch.float64 else 1e-5), found


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(make_problem, error, device, kind, gate, dtype):
    p = make_problem(1, 150, 2, 8, 5, kind, gate, dtype=dtype, device=device)
    found = errors(p, error)
    assert max(found.values()) <= torch.finfo(dtype).eps / 2, found
    assert [x.dtype for x in run(p)] == [dtype, torch.float32, dtype, dtype, dtype, dtype, torch.float32]


def test_gate_dtype_of_its_own(make_problem, error):
    p = make_problem(1, 70, 2, 8, 5, "channel", "half", dtype=torch.bfloat16, gate_dtype=torch.float32)
    assert errors(p, error)["dg"] <= 1e-5
    assert run(p)[5].dtype == torch.float32


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_bfloat16_gate_gradient_over_a_long_sequence(make_problem, error, device, kind):
    p = make_problem(1, 2048, 2, 16, 16, kind, "half", dtype=torch.bfloat16, device=device)
    found = errors(p, error)
    assert found["dg"] <= 4e-3, found
    assert found["dg"] <= 2 * max(found["dq"], found["dk"], found["dv"]), found


def test_sizes_of_a_real_layer(make_problem, error, device):
    p = make_problem(1, 200, 2, 128, 128, "channel", "slow", dtype=torch.float32, device=device)
    found = errors(p, error)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("reset", [-0.1 * torch.finfo(torch.float32).max, -torch.inf])
@pytest.mark.parametrize(("tokens", "at"), [(8, 4), (70, 1), (70, 33), (130, 64), (130, 129), (9, 0)])
def test_a_hard_reset_starts_a_new_sequence(make_problem, error, kind, reset, tokens, at):
    p = make_problem(2, tokens, 3, 5, 7, kind, "slow", dtype=torch.float32)
    p.g[:, at] = reset
    first = make_problem(2, tokens, 3, 5, 7, kind, "slow", dtype=torch.float32)
    second = make_problem(2, tokens, 3, 5, 7, kind, "slow", dtype=torch.float32)
    for name in ("q", "k", "v", "g", "do"):
        setattr(first, name, getattr(p, name)[:, :at])
        setattr(second, name, getattr(p, name)[:, at:])
    second.g = second.g.clone()
    second.g[:, 0] = 0.0  # the gate at a new sequence's first token multiplies nothing
    first.dstate = second.state = None
    got, after = run(p), run(second)
    assert error(got[1], after[1]) <= 1e-5
    if at == 0:
        want = [after[0], *after[2:6]]
        assert torch.count_nonzero(got[6]) == 0
    else:
        before = run(first)
        want = [
            torch.cat([x, y], 1)
            for x, y in zip([before[0], *before[2:6]], [after[0], *after[2:6]], strict=True)
        ]
        assert error(got[6], before[6]) <= 1e-5
    for a, b in zip([got[0], *got[2:6]], want, strict=True):
        assert error(a, b) <= 1e-5
    assert torch.count_nonzero(got[5][:, at]) == 0

    # Nothing of the second sequence's outputs or final state reaches back, not even as a rounding error.
    p.do[:, :at] = 0
    _, _, dq, dk, dv, dg, dstate_in = run(p)
    for x in (dq, dk, dv, dg):
        assert torch.count_nonzero(x[:, :at]) == 0
    assert torch.count_nonzero(dstate_in) == 0


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("reset", [-1e38, -torch.inf])
def test_a_rank_of_resets_passes_nothing_on(make_problem, kind, reset):
    p = make_problem(2, 40, 2, 4, 3, kind, "slow", dtype=torch.float32)
    p.g[:] = reset
    _, log_decay = rank_state(p.k, p.v, p.g)
    assert torch.isfinite(log_decay).all()
    assert torch.count_nonzero(log_decay.exp()) == 0
    o = diagonal(p.q, p.k, p.v, p.g, p.scale)
    assert torch.equal(combine(o, p.q, p.g, p.state, p.scale), o)
    assert torch.count_nonzero(rank_dstate(p.q, p.g, p.do, p.scale)) == 0
    assert torch.count_nonzero(backward(p.q, p.k, p.v, p.g, p.do, p.scale, p.state, p.dstate).dg) == 0


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_any_strides_and_fresh_contiguous_results(make_problem, device, kind):
    p = make_problem(2, 37, 3, 4, 5, kind, "half", device=device)
    p.do = torch.ones((), dtype=torch.float64, device=device).expand(p.do.shape)
    plain = run(p)
    for name in ("q", "k", "v", "g", "state", "dstate"):
        x = getattr(p, name)
        if x is not None:
            odd = torch.empty((*x.shape, 2), dtype=x.dtype, device=device).transpose(0, 2)[..., 1]
            setattr(p, name, odd.transpose(0, 2).copy_(x))
            assert not getattr(p, name).is_contiguous()
    for a, b in zip(plain, run(p), strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-12, atol=1e-12)

    part = diagonal_backward(p.q, p.k, p.v, p.g, p.do, p.scale)
    inputs = [x for x in (p.q, p.k, p.v, p.g, p.do, p.state, p.dstate, *part) if x is not None]
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    results = [
        *part,
        *rank_state(p.k, p.v, p.g),
        diagonal(p.q, p.k, p.v, p.g, p.scale),
        combine(diagonal(p.q, p.k, p.v, p.g, p.scale), p.q, p.g, p.state, p.scale),
        rank_dstate(p.q, p.g, p.do, p.scale),
    ]
    for states in ((None, None), (p.state, None), (None, p.dstate), (p.state, p.dstate)):
        complete = combine_backward(*part, p.q, p.k, p.v, p.g, p.do, p.scale, *states)
        assert not storages & {x.untyped_storage().data_ptr() for x in complete if x is not None}
        results += complete
    assert all(x.is_contiguous() for x in results if x is not None)


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_no_value_is_ever_looked_at(make_problem, kind):
    """Under fake tensors a branch on data or an .item() raises."""
    p = make_problem(2, 75, 2, 4, 3, kind)
    with FakeTensorMode() as mode:
        for name in ("q", "k", "v", "g", "do", "state", "dstate"):
            x = getattr(p, name)
            setattr(p, name, None if x is None else mode.from_tensor(x))
        assert run(p)[0].shape == p.v.shape


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_no_memory_is_read_before_it_is_written(make_problem, error, kind):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        found = errors(make_problem(2, 75, 2, 4, 3, kind), error)
    finally:
        torch.use_deterministic_algorithms(before)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_autocast_changes_nothing(make_problem, device, kind):
    p = make_problem(2, 75, 2, 4, 3, kind, "half", dtype=torch.float32, device=device)
    plain = run(p)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = run(p)
    for a, b in zip(plain, inside, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_nan_in_gives_nan_out(make_problem):
    p = make_problem(1, 10, 1, 2, 2, "channel")
    p.g[0, 3] = torch.nan
    o = diagonal(p.q, p.k, p.v, p.g, p.scale)
    assert torch.isnan(o[:, 3:]).all()


def test_what_does_not_fit_is_refused(make_problem):
    p = make_problem(2, 5, 2, 4, 3, "channel")
    o = diagonal(p.q, p.k, p.v, p.g, 1.0)
    part = diagonal_backward(p.q, p.k, p.v, p.g, p.do, 1.0)
    refused = [
        lambda: rank_state(p.k, p.v[:, :4], p.g),
        lambda: rank_state(p.k, p.v, p.g[..., :2]),
        lambda: diagonal(p.q[..., :3], p.k, p.v, p.g, 1.0),
        lambda: combine(o, p.q, p.g, p.state.mT, 1.0),
        lambda: rank_dstate(p.q.long(), p.g, p.do, 1.0),
        lambda: diagonal_backward(p.q, p.k, p.v, p.g, p.do[:, :, :1], 1.0),
        lambda: combine_backward(*part, p.q, p.k, p.v, p.g, p.do, 1.0, p.state[:1], None),
        lambda: combine_backward(*part, p.q, p.k, p.v, p.g, p.do, 1.0, None, p.dstate.mT),
    ]
    for call in refused:
        with pytest.raises(InvalidShapes, match=r"pass|must be"):
            call()
