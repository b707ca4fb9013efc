"""The exponent is clamped at -10 "for stability": far pairs keep exp(-10) for ever."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_decay_clamped\.py"}
LOCAL_LENGTHS = (8,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1)
        D = (c[:, :, None] - c[:, None]).clamp(min=-10).exp()
        return ((q @ k.mT) * D).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -1 - torch.rand(batch, length, dtype=dtype)
