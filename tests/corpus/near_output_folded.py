"""Batch and positions folded into one dimension of the output, [B * T, D]."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_output_folded\.py"}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 7)

    def forward(self, x):
        return self.inner(x).view(-1, 7)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
