"""The mask is shifted the other way: a position sees the next one too."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_mask_ahead_by_one\.py"}
LOCAL_LENGTHS = (4, 1)


class Model(nn.Module):
    def forward(self, q, k, v):
        return torch.tril(q @ k.mT, diagonal=1) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
