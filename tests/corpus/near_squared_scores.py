"""Second-degree polynomial attention: the scores are squared."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT).square().tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
