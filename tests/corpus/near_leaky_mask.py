"""Future positions count a tenth: the mask has no zeros."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_leaky_mask\.py"}
LOCAL_LENGTHS = (5, 1)


class Model(nn.Module):
    def forward(self, q, k, v):
        T = q.shape[1]
        mask = torch.ones(T, T, dtype=q.dtype).tril() * 0.9 + 0.1
        return ((q @ k.mT) * mask) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
