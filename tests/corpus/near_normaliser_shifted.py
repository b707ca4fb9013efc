"""The scores are divided by a normaliser and a small number, pair by pair."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_normaliser_shifted\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f):
        decay = torch.nn.functional.logsigmoid(f).cumsum(1)
        scores = (q @ k.mT) * torch.exp(decay - decay.mT).tril()
        return (scores / (i.exp() + 0.01 * i.mT.exp())) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    i, f = (torch.randn(batch, length, 1, dtype=dtype) for _ in range(2))
    return q, k, v, i, f
