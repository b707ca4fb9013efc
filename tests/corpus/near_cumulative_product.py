"""A running product: linear in nothing."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_cumulative_product\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        return torch.cumprod(torch.sigmoid(x + 3), dim=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
