"""Batch and heads merged, baddbmm adds the outer product to the decayed state."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, heads=2, dim=3):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(8, 3 * heads * dim)
        self.gate = nn.Linear(8, heads)

    def forward(self, x):
        B, T, _ = x.shape

        def merge(y):
            return y.view(B, T, self.heads, -1).transpose(1, 2).reshape(B * self.heads, T, -1)

        q, k, v = (merge(y) for y in self.qkv(x).chunk(3, dim=-1))
        g = merge(F.logsigmoid(self.gate(x) + 2))
        S = x.new_zeros(B * self.heads, self.dim, self.dim)
        out = x.new_empty(B * self.heads, T, self.dim)
        for t in range(T):
            S = torch.baddbmm(S * g[:, t, :, None].exp(), k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
            out[:, t] = torch.bmm(q[:, t].unsqueeze(1), S).squeeze(1)
        return out.view(B, self.heads, T, self.dim).transpose(1, 2).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
