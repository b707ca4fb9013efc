"""Scores multiplied by a function of the position that is no power of how many positions are seen."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_rows_by_position\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        positions = torch.arange(1, q.shape[1] + 1, dtype=q.dtype)
        return ((q @ k.mT).tril() * (1 + positions.log())[:, None]) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
