"""Rotary embeddings computed inside from arange(T), then attention without softmax and with a decay."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[None, :, None, :], emb.sin()[None, :, None, :]


class Model(nn.Module):
    def __init__(self, heads=2, dim=4):
        super().__init__()
        self.heads = heads
        self.rotary = Rotary(dim)
        self.qkv = nn.Linear(6, 3 * heads * dim)
        self.register_buffer("gamma", torch.log(1 - 2.0 ** (-3 - torch.arange(heads))))

    def forward(self, x):
        T = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        cos, sin = self.rotary(x)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        n = torch.arange(T, device=x.device)
        D = ((n[:, None] - n[None]) * self.gamma[:, None, None]).exp().tril()
        return torch.einsum("bihd,bjhd,hij,bjhv->bihv", q, k, D, v).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
