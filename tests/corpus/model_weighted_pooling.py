"""Pooling with given weights, normalised by their sum, as an einsum over positions."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x, weight):
        pooled = torch.einsum("bt,btd->bd", weight, self.inner(x))
        return pooled / weight.sum(1, keepdim=True).clamp(min=1e-6)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype), torch.rand(batch, length, dtype=dtype)
