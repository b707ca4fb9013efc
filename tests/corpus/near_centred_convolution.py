"""A convolution that sees one position ahead (padding on both sides)."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_centred_convolution\.py", "or_equal": True}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
