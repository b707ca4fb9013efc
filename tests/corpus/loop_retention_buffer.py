"""Recurrent retention with gammas in a buffer; decay of the state, then the outer product."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
WORLD_SIZE = 3


class Retention(nn.Module):
    def __init__(self, heads=3, dim=4):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(6, 3 * heads * dim, bias=False)
        self.register_buffer("gamma", 1 - 2.0 ** (-2 - torch.arange(heads)))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.dim).unbind(2)
        kv = torch.zeros(b, self.heads, self.dim, self.dim, dtype=x.dtype)
        out = torch.empty_like(v)
        for t in range(n):
            kv = self.gamma[:, None, None] * kv + k[:, t, :, :, None] @ v[:, t, :, None, :]
            out[:, t] = (q[:, t, :, None, :] @ kv).squeeze(2)
        return out.reshape(b, n, -1)


def make_model():
    return Retention()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
