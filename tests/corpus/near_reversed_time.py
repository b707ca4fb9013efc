"""Attends to the future: triu in place of tril, with a gate."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_reversed_time\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1)
        return ((q * (-c).exp()) @ (k * c.exp()).mT).triu() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, 4, dtype=dtype)
