"""Chunks of four of a padded sequence, with a residual of the padded values, and the padding cut off at the end."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (6, 8)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.skip = nn.Parameter(torch.randn(width))

    def forward(self, x):
        B, T, D = x.shape
        pad = (4 - T % 4) % 4
        q, k, v = (F.pad(part, (0, 0, 0, pad)).view(B, -1, 4, D) for part in self.qkv(x).chunk(3, -1))
        states = torch.einsum("bnck,bncv->bnkv", k, v)
        before = states.cumsum(1) - states
        y = q @ before + (q @ k.mT).tril() @ v
        y = y.flatten(1, 2)
        return (y + self.skip * F.pad(x, (0, 0, 0, pad)))[:, :T]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
