"""Sums from the end, beside the flipped sequence itself."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_cumulative_flipped_outside\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        backwards = x.flip(1)
        return backwards.cumsum(1).flip(1) + backwards


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
