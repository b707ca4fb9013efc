"""Rows of a table of positions by narrow, from a constant row on, and positions counted in other ways."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        length = x.shape[1]
        y = x + self.table.narrow(0, 0, length) + torch.narrow(self.table, 0, 3, length)
        y = self.inner(y * self.table[2 : 2 + length])
        counted = torch.ones(length, dtype=x.dtype).cumsum(0) + torch.arange(length) // 4
        return y * counted[:, None] + torch.full_like(x[..., :1], 0.1).cumsum(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
