"""The token in the middle, x[:, T // 2], and the rows of a table behind those of the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_row_in_the_middle\.py", "or_equal": True}
LOCAL_LENGTHS = (6,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 4))

    def forward(self, x):
        length = x.shape[1]
        return x + x.select(1, length // 2)[:, None] + self.table[length : 2 * length]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
