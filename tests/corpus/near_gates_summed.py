"""Two gates that are added in a step: the decay is no product of functions of each."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_gates_summed\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, k, v, a, b):
        S, out = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
        for t in range(k.shape[1]):
            S = a[:, t, None, None] * S + b[:, t, :, None] * S + k[:, t, :, None] * v[:, t, None]
            out.append(S.sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    k, v, b = (torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
    return k, v, 0.4 * torch.rand(batch, length, dtype=dtype), 0.5 * torch.sigmoid(b)
