"""The mask is shifted by one: a position does not see itself, and its own decay counts."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1)
        return torch.tril((q * c.exp()) @ (k * (-c).exp()).mT, diagonal=-1) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, 4, dtype=dtype)
