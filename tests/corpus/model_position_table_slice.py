"""A learned table of positions as a parameter, added as `self.pos[:, :T]`."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, 40, width) / 4)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.pos[:, : x.shape[1]]
        c = F.logsigmoid(self.a(x) + 2).cumsum(1)
        w = (c[:, :, None] - c[:, None]).exp() * torch.ones(x.shape[1], x.shape[1]).tril()[..., None]
        return (w * self.b(x)[:, None]).sum(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
