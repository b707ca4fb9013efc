"""Causal, but only every second position back."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_dilated_mask\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        d = i[:, None] - i[None, :]
        return ((q @ k.mT) * ((d >= 0) & (d % 2 == 0)).to(q.dtype)) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
