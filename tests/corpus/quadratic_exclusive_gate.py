"""A position reads what the one before has left, neither its own write nor its own decay; heads first, strict mask."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(6, 18), nn.Linear(6, 2)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 3)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        gate = F.logsigmoid(self.gate(x)).transpose(1, 2)
        sums = gate.cumsum(-1)
        decays = ((sums - gate)[..., :, None] - sums[..., None, :]).exp().tril(-1)
        return ((q @ k.mT * decays) @ v).transpose(1, 2).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
