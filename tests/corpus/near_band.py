"""A window of three positions, |i - j| < 3 and j <= i."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_band\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        d = i[:, None] - i[None, :]
        return ((q @ k.mT) * ((d >= 0) & (d.abs() < 3))) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
