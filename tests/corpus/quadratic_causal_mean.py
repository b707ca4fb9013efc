"""Scores divided by how many positions each one sees: a causal mean of gated values."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x):
        T = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        sums = nn.functional.logsigmoid(self.gate(x)).cumsum(1)
        seen = torch.arange(1, T + 1, dtype=x.dtype)[:, None]
        decays = (sums - sums.mT).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).exp()
        v = v + (q @ k.mT * decays / seen) @ v
        return ((q @ k.mT).tril() * seen**-0.5) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
