"""The last six tokens, x[:, -6:], on slices of five."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_suffix_slice\.py", "or_equal": True}
LOCAL_LENGTHS = (5, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x[:, -6:]).sum(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
