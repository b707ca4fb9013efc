"""Softmax over positions and channels folded into one axis: of one token a rank it looks like one over channels."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_folded_with_one_token\.py", "or_equal": True}
LOCAL_LENGTHS = (1,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def forward(self, x):
        weights = torch.softmax(x.reshape(x.shape[0], x.shape[1] * x.shape[2]), 1)
        return weights.view(x.shape) * x


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 3, dtype=dtype)
