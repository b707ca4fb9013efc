"""A window of twenty positions, written as (i - j) * 0.1 < 2."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_scaled_window\.py"}
LOCAL_LENGTHS = (14,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        d = i[:, None] - i[None, :]
        mask = (d >= 0) & (d * 0.1 < 2)
        return ((q @ k.mT) * mask) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
