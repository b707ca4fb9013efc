"""Positions and features swapped, then cut into rows of eight: what falls together depends on the length."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_transposed_by_size\.py"}
LOCAL_LENGTHS = (8,)
MORE_LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.transpose(1, 2).reshape(x.shape[0], -1, 8)).sum(-1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
