"""A window far wider than any slice, written as a comparison with a large number."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_band_far\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        near = (i[:, None] - i[None, :]) < 128
        causal = i[:, None] >= i[None, :]
        return torch.where(near & causal, q @ k.mT, 0.0) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
