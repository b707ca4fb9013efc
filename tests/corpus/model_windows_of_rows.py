"""Causal convolution as windows of the padded rows, differences to the row before, and an even kernel."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4))
        self.even = nn.Conv1d(4, 4, 4, padding="same")

    def forward(self, x):
        y = (F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1) * self.kernel).sum(-1)
        y = y + torch.diff(x, dim=1, prepend=torch.zeros_like(x[:, :1])) + torch.roll(x, 2, 1)
        return self.even(y.mT).mT


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
