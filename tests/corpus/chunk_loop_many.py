"""Chunks in a loop, more of them than a test needs to be quick: with positive gates the state would grow by e^30."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (12,), (24,)


class Model(nn.Module):
    def __init__(self, width=4, size=4):
        super().__init__()
        self.size = size
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 1)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (part.reshape(B, T // self.size, self.size, D) for part in self.qkv(x).chunk(3, -1))
        sums = F.logsigmoid(self.gate(x)).reshape(B, T // self.size, self.size).cumsum(-1)
        decays = (sums[..., :, None] - sums[..., None, :]).exp().tril()
        inside = (q @ k.mT * decays) @ v
        state, out = x.new_zeros(B, D, D), []
        for n in range(T // self.size):
            out.append(inside[:, n] + (q[:, n] * sums[:, n, :, None].exp()) @ state)
            left = (sums[:, n, -1:] - sums[:, n]).exp()[..., None]
            state = state * sums[:, n, -1].exp()[:, None, None] + (k[:, n] * left).mT @ v[:, n]
        return torch.cat(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
