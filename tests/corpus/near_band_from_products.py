"""The window is 25 positions, hidden in a comparison of square roots with 5."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_band_from_products\.py"}
LOCAL_LENGTHS = (16,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device, dtype=q.dtype)
        d = i[:, None] - i[None, :]
        return ((q @ k.mT) * ((d >= 0) & (d.clamp(min=0).sqrt() < 5))) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
