"""Causal convolution as F.pad on the left and a functional convolution; wider than one rank's slice."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def __init__(self, width=6, size=4):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.randn(3 * width, 1, size) / 2)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        y = F.pad(self.qkv(x).transpose(1, 2), (self.size - 1, 0))
        y = F.conv1d(y, self.weight, groups=self.weight.shape[0]).transpose(1, 2)
        q, k, v = F.silu(y).chunk(3, dim=-1)
        return (q @ k.transpose(1, 2)).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
