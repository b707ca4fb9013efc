"""A running maximum that begins anew in every chunk; chunks of one rank are no chunks of another's."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_cumulative_in_chunks\.py"}
LOCAL_LENGTHS = (8,)


class Model(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (-1, 4)).cummax(2).values.flatten(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
