"""Attention inside blocks of four positions: right on a slice of whole blocks, wrong on any other."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_block_local\.py", "or_equal": True}
LOCAL_LENGTHS = (8, 4)


class Model(nn.Module):
    def forward(self, q, k, v):
        b, t, d = q.shape
        q, k, v = (x.view(b, t // 4, 4, d) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).view(b, t, d)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
