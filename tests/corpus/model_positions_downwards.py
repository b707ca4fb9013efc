"""Positions counted down to the end, from a number on, and in steps; the length of the whole sequence is in them."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        length = x.shape[1]
        left = torch.arange(length - 1, -1, -1, dtype=x.dtype, device=x.device)
        behind = torch.arange(length, 2 * length, device=x.device).to(x.dtype)
        steps = torch.arange(2 * length, 0, -2, device=x.device).to(x.dtype)
        return self.inner(x) * (0.1 * left + 0.01 * behind + torch.sin(steps))[:, None]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
