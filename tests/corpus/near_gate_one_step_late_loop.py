"""The loop decays with the gate of the step before (nothing at the first)."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_gate_one_step_late_loop\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def forward(self, q, k, v, a):
        S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        out = []
        for t in range(q.shape[1]):
            if t > 0:
                S = S * a[:, t - 1, :, None]
            S = S + k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, :, None] * S).sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, dtype=dtype),
        1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype),
    )
