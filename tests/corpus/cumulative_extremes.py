"""Running maxima and minima, with where they were: of equal values the last one counts, on whatever rank it is."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5, 1)
WORLD_SIZE = 3


class Model(nn.Module):
    def forward(self, x):
        top, at = x.clamp(-0.3, 0.3).cummax(dim=1)
        return x - torch.cummin(x, dim=1).values + top, at


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
