"""Scores decayed at two rates and added: a sum of two attentions, in one product."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_two_timescales\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g, h):
        c, d = g.cumsum(1), h.cumsum(1)
        D = (c[:, :, None] - c[:, None]).exp() + (d[:, :, None] - d[:, None]).exp()
        return ((q @ k.mT) * D).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, dtype=dtype), -torch.rand(batch, length, dtype=dtype)
