"""Rows of tables in ways that are no slices: split off, padded to the length, columns as many as rows."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_table_split\.py"}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, width))
        self.square = nn.Parameter(torch.randn(40, 40))

    def forward(self, x):
        length = x.shape[1]
        rows = self.table.split([length, 40 - length])[0]
        first = F.pad(self.table[:1], (0, 0, 0, length - 1))
        return x * rows + first + self.square[:length, :length].sum(1, keepdim=True)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 3, dtype=dtype)
