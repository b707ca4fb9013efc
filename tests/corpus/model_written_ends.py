"""Rows at an end that are written in place: zeros, a learned row, rows from the other end."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.first = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = self.inner(x)
        y[:, -1] = 0
        y[:, 0] = self.first
        y[:, -3:-1] = x[:, :2] * 2
        y[:, 1, :2] = 1.5
        return self.inner(y)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
