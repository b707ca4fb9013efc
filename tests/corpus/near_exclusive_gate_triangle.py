"""The gate of a position acts behind it, but its own write is divided by it: the diagonal was not thought of."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_exclusive_gate_triangle\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        sums = g.cumsum(1)
        decays = ((sums - g)[:, :, None] - sums[:, None, :]).exp().tril()
        return (q @ k.mT * decays) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -torch.rand(batch, length, dtype=dtype)
