"""Subtracts the mean over all positions before attention, scaled by numel-based statistics."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        x = x - x.mean(dim=1, keepdim=True)
        x = x / (x.square().sum() / x.numel()).sqrt()
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.tril(q @ k.mT) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
