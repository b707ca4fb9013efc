"""The exponent has the input gates of all positions from the one that is read on."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_input_gate_of_later\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f):
        decay = torch.nn.functional.logsigmoid(f).cumsum(1)
        gates = i.cumsum(1)
        return ((q @ k.mT) * torch.exp(decay - decay.mT + (gates - gates.mT + i.mT).relu()).tril()) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    i, f = (torch.randn(batch, length, 1, dtype=dtype) for _ in range(2))
    return q, k, v, i, f
