"""Mamba-2's minimal listing with one chunk for everything: segsum, then one einsum over C, B, L and X."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (4,)


def segsum(x):
    T = x.size(-1)
    cumulated = torch.cumsum(x, dim=-1)
    out = cumulated[..., :, None] - cumulated[..., None, :]
    mask = torch.tril(torch.ones(T, T, device=x.device, dtype=torch.bool), diagonal=0)
    return out.masked_fill(~mask, -torch.inf)


class SSD(nn.Module):
    def __init__(self, width=10, heads=4, headdim=3, state=5):
        super().__init__()
        self.heads, self.headdim, self.state = heads, headdim, state
        self.in_proj = nn.Linear(width, heads * headdim + 2 * state + heads)
        self.A_log = nn.Parameter(torch.rand(heads))
        self.D = nn.Parameter(torch.randn(heads))
        self.dt_bias = nn.Parameter(torch.randn(heads) - 2)
        self.out_proj = nn.Linear(heads * headdim, width)

    def forward(self, u):
        x, B, C, dt = self.in_proj(u).split(
            [self.heads * self.headdim, self.state, self.state, self.heads], dim=-1
        )
        dt = F.softplus(dt + self.dt_bias)
        A = -torch.exp(self.A_log)
        x = x.unflatten(-1, (self.heads, self.headdim))
        L = torch.exp(segsum((A * dt).transpose(1, 2)))
        y = torch.einsum("bln,bsn,bhls,bshp->blhp", C, B, L, x * dt.unsqueeze(-1))
        y = y + self.D[:, None] * x
        return self.out_proj(y.flatten(2))


def make_model():
    return SSD()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 10, dtype=dtype)
