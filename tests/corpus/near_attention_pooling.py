"""Pooling with weights that a softmax over all positions makes."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_attention_pooling\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x):
        return (self.score(x).softmax(1) * x).sum(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
