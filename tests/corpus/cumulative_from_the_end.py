"""Sums from each position to the end, between two flips, and a linear attention of them."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        rest = torch.sigmoid(x).flip(1).cumsum(1).exp().flip(1)
        q, k, v = self.qkv(rest / (1 + rest)).chunk(3, dim=-1)
        return (q @ k.mT).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
