"""A right-looking attention form, but the gates are normalised over the sequence by a softmax."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_gate_sees_future\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, z):
        g = -torch.softmax(z, dim=1)
        c = g.cumsum(1)
        return ((q * c.exp()) @ (k * (-c).exp()).mT).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(batch, length, 4, dtype=dtype)
