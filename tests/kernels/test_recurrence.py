"""The recurrence against its definition written out as a sum over pairs of tokens."""

from __future__ import annotations

import pytest
import torch

from zeco_compile.kernels import InvalidShapes, recurrent_gated_linear_attention


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_equals_the_sum_over_pairs(make_problem, kind):
    p = make_problem(2, 6, 3, 4, 5, kind, "half")
    o, final = recurrent_gated_linear_attention(
        p.q, p.k, p.v, p.g, scale=p.scale, initial_state=p.state, output_final_state=True
    )
    zero = torch.zeros(2, 6, 3, 1, dtype=torch.float64)
    g = zero if p.g is None else (p.g if p.g.dim() == 4 else p.g.unsqueeze(-1))
    for t in range(6):
        state = p.state * g[:, : t + 1].sum(1).exp().unsqueeze(-1)
        for s in range(t + 1):
            decay = g[:, s + 1 : t + 1].sum(1).exp()
            state = state + torch.einsum("bhk,bhv->bhkv", decay * p.k[:, s], p.v[:, s])
        torch.testing.assert_close(o[:, t], p.scale * torch.einsum("bhk,bhkv->bhv", p.q[:, t], state))
    torch.testing.assert_close(final, state)


def test_dtypes(make_problem):
    p = make_problem(1, 3, 1, 2, 2, "head", dtype=torch.bfloat16)
    o, final = recurrent_gated_linear_attention(p.q, p.k, p.v, p.g, scale=1.0, output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    o, final = recurrent_gated_linear_attention(p.q, p.k, p.v, p.g, scale=1.0, dtype=torch.float64)
    assert o.dtype == torch.float64
    assert final is None


def test_what_does_not_fit_is_refused(make_problem):
    p = make_problem(2, 3, 2, 4, 5, "channel")
    call = lambda q=p.q, k=p.k, v=p.v, g=p.g, state=None: recurrent_gated_linear_attention(  # noqa: E731
        q, k, v, g, scale=1.0, initial_state=state
    )
    call()
    for wrong in (
        {"q": p.q[0]},
        {"q": p.q[..., :3]},
        {"k": p.k[:, :2]},
        {"v": p.v[:, :, :1]},
        {"v": p.v.long()},
        {"g": p.g[..., :1]},
        {"g": p.g[:, :, 0, 0]},
        {"state": p.state.mT},
        {"q": p.q[:, :0], "k": p.k[:, :0], "v": p.v[:, :0], "g": p.g[:, :0]},
    ):
        with pytest.raises(InvalidShapes):
            call(**wrong)
