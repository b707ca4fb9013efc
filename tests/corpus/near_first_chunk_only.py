"""The sequence in chunks of two tokens, of which only the first is pooled: every rank has a first chunk of its own."""

import torch
from torch import nn

EXPECTED = {"refused": "sequence|tokens|length"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        chunks = self.out(x).unflatten(1, (-1, 2))
        return chunks[:, :1].mean((1, 2))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
