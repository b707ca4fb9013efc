"""mLSTM-like: masked scores divided by max(|their sum|, 1) before they meet v."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1)
        D = (c[:, :, None] - c[:, None]).exp().tril()
        scores = (q @ k.mT) * D
        scores = scores / scores.sum(-1, keepdim=True).abs().clamp(min=1)
        return scores @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, dtype=dtype)
