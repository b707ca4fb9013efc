"""The largest value over all positions, and the first position that has it."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_max_pooling\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def forward(self, x):
        value, where = x.max(dim=1)
        return value, where


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
