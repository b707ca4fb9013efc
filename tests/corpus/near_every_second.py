"""Strided: every second position."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_every_second\.py", "or_equal": True}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (6,)


class Model(nn.Module):
    def forward(self, x):
        return x[:, ::2] + x[:, 1::2]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
