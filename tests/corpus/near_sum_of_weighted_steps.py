"""The steps add up their states, each with its own number."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_sum_of_weighted_steps\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (5,), (3,)


class Model(nn.Module):
    def forward(self, a, b):
        h, total = torch.zeros_like(b[:, 0]), 0
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            total = total + h * (t + 1)
        return total


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
