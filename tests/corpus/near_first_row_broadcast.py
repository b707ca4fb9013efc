"""The first token is added to all, x + x[:, :1]."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_first_row_broadcast\.py", "or_equal": True}
LOCAL_LENGTHS = (5, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return y + y[:, :1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
