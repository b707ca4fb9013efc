"""A skip connection to every second token: a slice has them at other places than the whole sequence."""

import torch
from torch import nn

EXPECTED = {"refused": "sequence"}
LOCAL_LENGTHS = (3, 4)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = torch.tril(q @ k.mT) @ v
        return y, y[:, ::2].mean()


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
