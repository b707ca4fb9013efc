"""The GLA paper's parallel form: q and k carry the cumulated decay, the mask is multiplied."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS = (5, 1)


class Attention(nn.Module):
    def __init__(self, width=12, heads=3, key=4, value=5):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, heads * key, bias=False)
        self.k = nn.Linear(width, heads * key, bias=False)
        self.v = nn.Linear(width, heads * value, bias=False)
        self.gk = nn.Sequential(nn.Linear(width, 4, bias=False), nn.Linear(4, heads * key))
        self.o = nn.Linear(heads * value, width, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(B, T, self.heads, -1).transpose(1, 2)
        v = self.v(x).view(B, T, self.heads, -1).transpose(1, 2)
        g = (F.logsigmoid(self.gk(x)) / 16).view(B, T, self.heads, -1).transpose(1, 2)
        b = g.cumsum(-2).exp()
        mask = torch.tril(torch.ones(T, T, dtype=x.dtype, device=x.device))
        scores = (q * b * q.shape[-1] ** -0.5) @ (k / b).transpose(-1, -2)
        o = (scores * mask) @ v
        return self.o(o.transpose(1, 2).reshape(B, T, -1))


def make_model():
    return Attention()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 12, dtype=dtype)
