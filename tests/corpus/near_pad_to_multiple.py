"""Pads to a multiple of four, normalises inside of blocks of four, cuts the padding off."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_pad_to_multiple\.py", "or_equal": True}
LOCAL_LENGTHS = (6,)
MORE_LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        b, t, d = x.shape
        y = F.pad(x, (0, 0, 0, -t % 4))
        y = y.view(b, -1, 4, d)
        y = y / (1 + y.abs().sum(2, keepdim=True))
        return y.reshape(b, -1, d)[:, :t]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
