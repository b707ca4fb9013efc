"""Convolutions padded on both sides and cut in front: some rows of the result are computed from later ones."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.next = nn.Conv1d(width, width, 2, padding=1, groups=width)
        self.middle = nn.Conv1d(width, width, 3, padding=2)
        self.last = nn.Conv1d(width, width, 3, padding=2, groups=width)

    def forward(self, x):
        y = x.transpose(1, 2)
        y = self.next(y)[..., 1:] + self.middle(y)[..., 1:-1] + self.last(y)[..., :-2]
        return y.transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
