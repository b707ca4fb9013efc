"""Simple GLA as in fla's naive_parallel: [B, H, T, D], a scalar gate per head, D built before the product."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (3,)


class Naive(nn.Module):
    def forward(self, q, k, v, g):
        original = q.dtype
        q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
        T = q.shape[2]
        g = g.cumsum(-1)
        D = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(
            ~torch.tril(torch.ones(T, T, dtype=torch.bool, device=q.device)), float("-inf")
        )
        A = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) * D.exp()
        return (A @ v).transpose(1, 2).to(original)


def make_model():
    return Naive()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, 5, dtype=dtype),
        -0.3 * torch.rand(batch, length, 3, dtype=dtype),
    )
