"""Chunks as an axis, of which each rank has one: what goes from chunk to chunk is not in its trace."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_one_chunk_per_rank\.py.*give each rank more tokens"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.unflatten(1, (-1, 4)) for x in (q, k, v))
        states = k.mT @ v
        y = q @ (states.cumsum(1) - states) + (q @ k.mT).tril() @ v
        return y.flatten(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
