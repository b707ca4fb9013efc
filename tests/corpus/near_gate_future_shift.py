"""The gate of a step comes from the next token: shifted left with a pad at the end. Right if the halo is."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_gate_future_shift\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        g = F.pad(g, (0, 0, -1, 1))
        c = g.cumsum(1)
        return ((q * c.exp()) @ (k * (-c).exp()).mT).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, 4, dtype=dtype)
