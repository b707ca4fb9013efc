"""Scores are clipped to +-200, as some do against overflow; ordinary random numbers never get there."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT).clamp(-200, 200).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (20 * torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 4, dtype=dtype)
