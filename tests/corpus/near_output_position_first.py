"""Positions and batch folded, [T * B, D]: this one is a slice of the whole output."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_output_position_first\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 7)

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).flatten(0, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
