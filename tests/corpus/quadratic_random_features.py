"""Positive random features from a matrix in a buffer (Performer), q, k and v cut from one projection."""

import torch
from torch import nn

EXPECTED = {"families": ["none", "none"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=4, features=5):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("directions", torch.randn(features, width))

    def features(self, x):
        return torch.exp(x @ self.directions.T - x.square().sum(-1, keepdim=True) / 2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.features(q), self.features(k)
        state = torch.cumsum(k[..., :, None] * v[..., None, :], 1)
        norm = (q * torch.cumsum(k, 1)).sum(-1, keepdim=True)
        return torch.einsum("btf,btfd->btd", q, state) / norm


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
