"""Position ids [B, T] come as an input and index tables of cosines and sines."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, dim=4, longest=64):
        super().__init__()
        angle = torch.arange(longest)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.qkv = nn.Linear(5, 3 * dim)

    def rotate(self, x, position_ids):
        cos, sin = self.cos[position_ids], self.sin[position_ids]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def forward(self, x, position_ids):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.rotate(q, position_ids), self.rotate(k, position_ids)
        return torch.tril(q @ k.mT) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype), torch.arange(length).expand(batch, length) + 2
