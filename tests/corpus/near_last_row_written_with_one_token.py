"""The last row is written in place; with one token a rank it is all of each slice."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_last_row_written_with_one_token\.py", "or_equal": True}
LOCAL_LENGTHS = (1,)
MORE_LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        y = x * 1
        y[:, -1:] = 2
        return y * x


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 3, dtype=dtype)
