"""The sequence backwards."""

import torch
from torch import nn

EXPECTED = {"refused": r"(?s)near_flip\.py.*that run from the end"}
LOCAL_LENGTHS = (5, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(torch.flip(x, dims=[1]))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
