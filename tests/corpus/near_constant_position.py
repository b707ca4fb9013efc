"""One token in the middle, x[:, 2], given to all."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_constant_position\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def forward(self, x):
        return x + x[:, 2:3] * x[:, 2].sum(-1)[:, None, None]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
