"""The input gates of both positions are multiplied in the exponent."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f):
        decay = torch.nn.functional.logsigmoid(f).cumsum(1)
        return ((q @ k.mT) * torch.exp(decay - decay.mT + i * i.mT).tril()) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    i, f = (torch.randn(batch, length, 1, dtype=dtype) for _ in range(2))
    return q, k, v, i, f
