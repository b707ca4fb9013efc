"""A mean written as a sum over x.shape[1]: the length is the whole sequence's, not the slice's."""

import math

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Classifier(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        return self.head(y.sum(1) / x.shape[1]) + self.head.bias * math.sqrt(x.shape[1])


def make_model():
    return Classifier()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
