"""A loop that reads the state before it writes and begins with a learned one: the first token reads that as it is, the
constant decay has not been applied to it."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads
        self.state = nn.Parameter(torch.randn(heads, 4, 4))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        S = self.state.expand(x.shape[0], -1, -1, -1)
        outputs = []
        for t in range(x.shape[1]):
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
            S = 0.9 * S + k[:, t, :, :, None] * v[:, t, :, None]
        return torch.stack(outputs, 1), S


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
