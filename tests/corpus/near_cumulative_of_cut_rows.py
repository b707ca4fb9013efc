"""A running product of all rows but the first: the slices' first rows are not the sequence's."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_cumulative_of_cut_rows\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        return F.pad(torch.cumprod(x[:, 1:], dim=1), (0, 0, 1, 0))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
