"""The first seven tokens, on slices of five: they are on two ranks."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_first_seven_rows\.py", "or_equal": True}
LOCAL_LENGTHS = (5, 7)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x[:, :7]).mean(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
