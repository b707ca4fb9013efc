"""RWKV-6's WKV: read with the bonus u for the current token, then decay and update."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (4,), (5,)


class Model(nn.Module):
    def __init__(self, heads=2, dim=3):
        super().__init__()
        self.u = nn.Parameter(torch.randn(heads, dim))

    def forward(self, r, k, v, w):
        state = r.new_zeros(r.shape[0], r.shape[2], r.shape[3], v.shape[3])
        out = []
        for t in range(r.shape[1]):
            kv = k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append((r[:, t, :, :, None] * (state + self.u[..., None] * kv)).sum(-2))
            state = state * torch.exp(-torch.exp(w[:, t]))[..., None] + kv
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    r, k, v = (torch.randn(batch, length, 2, 3, dtype=dtype) for _ in range(3))
    return r, k, v, torch.randn(batch, length, 2, 3, dtype=dtype) - 2
