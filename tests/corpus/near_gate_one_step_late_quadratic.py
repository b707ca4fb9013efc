"""exp(G_{i-1} - G_{j-1}): cumulated gates without the current one, as an exclusive sum."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_gate_one_step_late_quadratic\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1) - g
        return ((q * c.exp()) @ (k * (-c).exp()).mT).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 3, dtype=dtype), -0.3 * torch.rand(batch, length, 4, dtype=dtype)
