"""Learned tokens put before the sequence, attended to like the others, and dropped again."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_meta_tokens\.py.*torch\.cat\("}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.meta, self.qkv = nn.Parameter(torch.randn(2, width)), nn.Linear(width, 3 * width)

    def forward(self, x):
        x = torch.cat([self.meta.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.mT).tril() @ v)[:, 2:]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
