"""Scores that are clipped where no number of a check is: no linear attention, and computed with gathered keys."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        scores = (q @ k.transpose(1, 2)).clamp(-1e13, 1e13)
        return scores.tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = torch.randn(3, batch, length, 4, dtype=dtype)
    return q * 1e7, k * 1e7, v
