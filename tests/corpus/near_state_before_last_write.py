"""A loop that reads the state before it writes, and returns what the last token has read, not what it leaves behind."""

import torch
from torch import nn

EXPECTED = {"refused": "not found to be the state of the recurrence after the last token"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.gate, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        a = torch.sigmoid(self.gate(x) + 2).unflatten(-1, (self.heads, -1))
        S = x.new_zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            before = S
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
            S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        return torch.stack(outputs, 1), before


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
