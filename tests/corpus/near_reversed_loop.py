"""A step loop from the last position to the first."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_reversed_loop\.py"}
LOCAL_LENGTHS = (5, 2)


class Model(nn.Module):
    def forward(self, a, b):
        h = torch.zeros_like(b[:, 0])
        out = torch.zeros_like(b)
        for t in reversed(range(a.shape[1])):
            h = a[:, t] * h + b[:, t]
            out[:, t] = h
        return out


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
