"""All positions but the last as the output: the ranks' parts cannot be put side by side."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_output_without_last\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)[:, :-1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
