"""Two kinds of layer in one model, a constant decay and a gate per channel, with a scale on q of one only."""

import math

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width)
        self.norm = nn.RMSNorm(width)
        self.register_buffer("log_gamma", torch.log(1 - 2.0 ** (-2 - torch.arange(heads))))

    def forward(self, x):
        T = x.shape[1]
        i = torch.arange(T, device=x.device)
        distance = i[:, None] - i[None]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.one(x).chunk(3, -1))
        D = torch.where(distance >= 0, (distance * self.log_gamma[:, None, None]).exp(), 0.0)
        x = x + ((q @ k.mT * D) @ v).transpose(1, 2).flatten(2)
        y = self.two(self.norm(x))
        q, k, v, g = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in y.chunk(4, -1))
        S = torch.zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1], dtype=x.dtype)
        out = []
        for t in range(T):
            S = S * torch.sigmoid(g[:, :, t, :, None] + 2) + k[:, :, t, :, None] * v[:, :, t, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t] / math.sqrt(q.shape[-1]), S))
        return x + torch.stack(out, 1).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
