"""The residual stream is added to in place, and then read at its ends, shifted and padded; so is a table."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        y = self.inner(x)
        y += x
        y[:, 0] = 1.5
        table = self.table * 2
        table[0] = 0
        shifted = F.pad(y, (0, 0, 1, 0))[:, :-1] + torch.cat([y[:, 1:], torch.zeros_like(y[:, :1])], 1)
        change = (y[:, 1:] - y[:, :-1]).pow(2).mean()
        return shifted + table[: x.shape[1]], y[:, -1] * change, y[:, :2].mean(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
