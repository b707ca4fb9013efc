"""Every channel limited to a norm, over all tokens of all sequences: `renorm` norms what it is not told."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_renorm\.py"}
LOCAL_LENGTHS = (5, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.renorm(self.inner(x), p=2, dim=2, maxnorm=1.0)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
