"""A row is taken as a view, and a column of the view written: the write shows in the tensor it was taken from."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_row_view_written\.py", "or_equal": True}
LOCAL_LENGTHS = (3,)
MORE_LOCAL_LENGTHS = (7,)


class Model(nn.Module):
    def forward(self, x):
        y = x * 1
        row = y[:, 0]
        row[:, 1] = 0
        return x * y


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
