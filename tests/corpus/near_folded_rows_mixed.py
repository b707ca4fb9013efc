"""The sequence is folded in two and the halves are mixed."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_folded_rows_mixed\.py"}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def forward(self, x):
        b, t, d = x.shape
        first, second = x.view(b, 2, t // 2, d).unbind(1)
        return torch.cat([first + second, first - second], 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
