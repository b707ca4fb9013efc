"""A position reads what the one before has left, undecayed by its own gate, and its own write as it is; a second layer
puts what it takes of its own token on the diagonal of the scores."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token", "per channel"]}
LOCAL_LENGTHS = (5,)


def heads(x):
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(6, 18), nn.Linear(6, 2)
        self.mix, self.channel_gate = nn.Linear(6, 18), nn.Linear(6, 6)
        self.bonus = nn.Parameter(torch.randn(2, 1, 3))

    def undecayed(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        gate = F.logsigmoid(self.gate(x)).transpose(1, 2)
        sums, here = gate.cumsum(-1), torch.arange(x.shape[1])
        between = (sums - gate)[..., :, None] - sums[..., None, :]
        between = between.masked_fill(here[:, None] == here, 0).masked_fill(here[:, None] < here, -torch.inf)
        return ((q @ k.mT * between.exp()) @ v).transpose(1, 2).flatten(2)

    def weighted(self, x):
        q, k, v = map(heads, self.mix(x).chunk(3, -1))
        gate = heads(F.logsigmoid(self.channel_gate(x)))
        sums = gate.cumsum(2)
        scores = ((q * (sums - gate).exp()) @ (k * (-sums).exp()).mT).tril(-1)
        scores = scores + torch.diag_embed((q * self.bonus * k).sum(-1))
        return (scores @ v).transpose(1, 2).flatten(2)

    def forward(self, x):
        return self.weighted(self.undecayed(x))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
