"""A step loop from the last position to the first, beside one from the first to the last."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def forward(self, a, b):
        h, there = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            there.append(h)
        h, out = torch.zeros_like(b[:, 0]), torch.zeros_like(b)
        for t in reversed(range(a.shape[1])):
            h = a[:, t] * h + b[:, t]
            out[:, t] = h
        return torch.cat([torch.stack(there, 1), out], -1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
