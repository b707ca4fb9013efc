"""A running maximum over the positions so far."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_cumulative_maximum\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        return x - torch.cummax(x, dim=1).values


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
