"""Sinusoidal positions from arange in a model whose loop makes the length a constant."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.width = width

    def forward(self, x):
        T = x.shape[1]
        position = torch.arange(T, dtype=x.dtype, device=x.device)
        frequency = 10.0 ** -torch.arange(0, self.width, 2, dtype=x.dtype, device=x.device)
        angle = position[:, None] * frequency[None]
        x = x + torch.cat([angle.sin(), angle.cos()], -1)
        a, b = torch.sigmoid(self.a(x) + 2), self.b(x)
        h, hs = torch.zeros_like(x[:, 0]), []
        for t in range(T):
            h = a[:, t] * h + b[:, t]
            hs.append(h)
        return torch.stack(hs, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
