"""Decays below a thousandth are dropped to save work."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_small_decays_dropped\.py"}
LOCAL_LENGTHS = (8,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1)
        D = (c[:, :, None] - c[:, None]).tril().exp().tril()
        D = torch.where(D > 1e-3, D, 0.0)
        return ((q @ k.mT) * D) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.3 - 0.6 * torch.rand(batch, length, dtype=dtype)
