"""Tokens sorted along the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_sort\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        return torch.sort(x, dim=1).values * 2


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
