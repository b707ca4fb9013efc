"""A sequence cut over ranks by hand: every rank's own gradient, against the uncut float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeco_compile.kernels import (
    backward,
    combine,
    combine_backward,
    diagonal,
    diagonal_backward,
    rank_dstate,
    rank_state,
)


def run_on_ranks(p, ranks):
    """Per rank [o, dq, dk, dv, dg]; the final state; the gradient of the initial state."""

    def cut(x):
        return [None] * ranks if x is None else x.chunk(ranks, dim=1)

    q, k, v, g, do = (cut(x) for x in (p.q, p.k, p.v, p.g, p.do))
    everyone = range(ranks)
    own = [rank_state(k[r], v[r], g[r]) for r in everyone]
    decay = [log_decay.exp().unsqueeze(-1) for _, log_decay in own]
    state, state_in = p.state, []
    for r in everyone:
        state_in.append(state)
        state = decay[r] * state + own[r][0]
    dstate, dstate_out = p.dstate, [None] * ranks
    for r in reversed(everyone):
        dstate_out[r] = dstate
        dstate = decay[r] * dstate + rank_dstate(q[r], g[r], do[r], p.scale)
    results = []
    for r in everyone:
        o = combine(diagonal(q[r], k[r], v[r], g[r], p.scale), q[r], g[r], state_in[r], p.scale)
        part = diagonal_backward(q[r], k[r], v[r], g[r], do[r], p.scale)
        whole = combine_backward(*part, q[r], k[r], v[r], g[r], do[r], p.scale, state_in[r], dstate_out[r])
        results.append([o, *whole])
    return results, state, dstate


def errors_per_rank(p, ranks, error, truth):
    (o, final), (dq, dk, dv, dg, dstate_in) = truth
    results, got_final, got_dstate = run_on_ranks(p, ranks)
    found = {"final state": error(got_final, final), "dstate_in": error(got_dstate, dstate_in)}
    for name, index, whole in (("o", 0, o), ("dq", 1, dq), ("dk", 2, dk), ("dv", 3, dv), ("dg", 4, dg)):
        if whole is None:
            continue
        for r, want in enumerate(whole.chunk(ranks, dim=1)):
            found[f"{name} of rank {r}"] = error(results[r][index], want)
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_gradient_of_every_rank(make_problem, error, data):
    draw = data.draw
    ranks = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    p = make_problem(
        draw(st.integers(1, 2)),
        ranks * draw(st.sampled_from([1, 2, 7, 33, 64])),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from([1, 5, 16])),
        draw(st.sampled_from(["none", "head", "channel"])),
        draw(
            st.sampled_from(
                ["slow", "slow", "zeros", "five", "mixed", "reset", "infinite", "gone", "positive"]
            )
        ),
        dtype=dtype,
        seed=draw(st.integers(0, 9)),
    )
    found = errors_per_rank(p, ranks, error, p.truth())
    assert max(found.values()) <= (1e-10 if dtype == torch.float64 else 1e-5), found


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_two_ranks_of_8192_tokens(make_problem, error, device, kind):
    """Slow gates that differ by head. The truth is one rank in float64, tested elsewhere."""
    p = make_problem(1, 2 * 8192, 4, 32, 32, kind, "slow", dtype=torch.float32, device=device)
    x = {name: None if y is None else y.double() for name, y in vars(p).items() if name != "scale"}
    state, log_decay = rank_state(x["k"], x["v"], x["g"])
    o = diagonal(x["q"], x["k"], x["v"], x["g"], p.scale)
    o = combine(o, x["q"], x["g"], x["state"], p.scale)
    decay = log_decay.exp().unsqueeze(-1)
    gradients = backward(x["q"], x["k"], x["v"], x["g"], x["do"], p.scale, x["state"], x["dstate"])
    dstate_in = decay * x["dstate"] + rank_dstate(x["q"], x["g"], x["do"], p.scale)
    truth = [o, decay * x["state"] + state], [*gradients, dstate_in]
    found = errors_per_rank(p, 2, error, truth)
    assert max(found.values()) <= 1e-5, found
