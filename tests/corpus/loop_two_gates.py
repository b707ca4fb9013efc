"""Two gates multiply, one per head and one per channel, in one loop: a single decay, their product."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, k, v, a, b):
        S, out = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
        for t in range(k.shape[1]):
            S = a[:, t, None, None] * (b[:, t, :, None] * S) + k[:, t, :, None] * v[:, t, None]
            out.append(S.sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    k, v, b = (torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
    return k, v, 1 - 0.3 * torch.rand(batch, length, dtype=dtype), torch.sigmoid(b + 2)
