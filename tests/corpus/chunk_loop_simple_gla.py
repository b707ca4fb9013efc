"""Chunks of two: inside a chunk the quadratic form, between chunks a state."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (6,)


def chunked(q, k, v, g, C=2):
    B, H, T, K = q.shape
    q, k, v = (x.view(B, H, T // C, C, -1) for x in (q, k, v))
    g = g.view(B, H, T // C, C).cumsum(-1)
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    S = q.new_zeros(B, H, K, v.shape[-1])
    out = torch.zeros_like(v)
    for n in range(T // C):
        L = (g[:, :, n, :, None] - g[:, :, n, None, :]).masked_fill(~causal, float("-inf")).exp()
        inside = (q[:, :, n] @ k[:, :, n].transpose(-1, -2) * L) @ v[:, :, n]
        out[:, :, n] = inside + (q[:, :, n] * g[:, :, n, :, None].exp()) @ S
        last = g[:, :, n, -1, None]
        kd = k[:, :, n] * (last - g[:, :, n]).exp()[..., None]
        S = S * last[..., None].exp() + kd.transpose(-1, -2) @ v[:, :, n]
    return out.view(B, H, T, -1)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        return chunked(*(x.transpose(1, 2) for x in (q, k, v, g))).transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    v = torch.randn(batch, length, 3, 5, dtype=dtype)
    return q, k, v, -0.2 * torch.rand(batch, length, 3, dtype=dtype)
