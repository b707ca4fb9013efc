"""A window of seven positions on slices of five: each slice by itself looks causal."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_band_wider_than_slice\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, window=7):
        super().__init__()
        self.window = window

    def forward(self, q, k, v):
        T = q.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(-(self.window - 1))
        return (q @ k.mT).masked_fill(~mask, 0) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
