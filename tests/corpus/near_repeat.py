"""The sequence twice in a row."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_repeat\.py"}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def forward(self, x):
        return x.repeat(1, 2, 1) * 2


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
