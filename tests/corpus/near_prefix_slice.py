"""The mean of the first eight tokens, x[:, :8], on slices of five."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_prefix_slice\.py", "or_equal": True}
LOCAL_LENGTHS = (5, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)[:, :8].mean(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
