"""Tokens take the nearest code, with evenly spaced numbers for their positions."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (4,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.codes = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        y, length = self.inner(x), x.shape[1]
        y = y * torch.linspace(0.5, 2, length)[:, None] + torch.linspace(1 - length, 0, length)[None, :, None]
        distances = torch.cdist(y, self.codes.expand(x.shape[0], -1, -1))
        return self.codes[distances.argmin(-1)] + y, distances.min(-1).values.mean()


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
