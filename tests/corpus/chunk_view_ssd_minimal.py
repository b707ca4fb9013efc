"""Mamba-2's minimal listing: chunks as an axis, segment sums inside of them and between them."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (8,)
MORE_LOCAL_LENGTHS = (12,)


def segsum(x):
    T = x.size(-1)
    x = x[..., None].repeat(1, 1, 1, 1, T) if x.dim() == 4 else x[..., None].repeat(1, 1, 1, T)
    mask = torch.tril(torch.ones(T, T, device=x.device, dtype=torch.bool), diagonal=-1)
    x_segsum = torch.cumsum(x.masked_fill(~mask, 0), dim=-2)
    mask = torch.tril(torch.ones(T, T, device=x.device, dtype=torch.bool), diagonal=0)
    return x_segsum.masked_fill(~mask, -torch.inf)


def ssd(X, A, B, C, block):
    b, t, h, p = X.shape
    n = B.shape[-1]
    X = X.reshape(b, t // block, block, h, p)
    B, C = (z.reshape(b, t // block, block, h, n) for z in (B, C))
    A = A.reshape(b, t // block, block, h).permute(0, 3, 1, 2)
    A_cumsum = torch.cumsum(A, dim=-1)
    L = torch.exp(segsum(A))
    Y_diag = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, L, X)
    decay_states = torch.exp(A_cumsum[:, :, :, -1:] - A_cumsum)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, decay_states, X)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    decay_chunk = torch.exp(segsum(F.pad(A_cumsum[:, :, :, -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decay_chunk, states)[:, :-1]
    Y_off = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, torch.exp(A_cumsum))
    return (Y_diag + Y_off).reshape(b, t, h, p)


class Model(nn.Module):
    def __init__(self, width=10, heads=2, headdim=3, state=5):
        super().__init__()
        self.heads, self.headdim, self.state = heads, headdim, state
        self.in_proj = nn.Linear(width, heads * (headdim + 2 * state + 1))
        self.A_log = nn.Parameter(torch.rand(heads))

    def forward(self, u):
        x, B, C, dt = self.in_proj(u).split(
            [self.heads * n for n in (self.headdim, self.state, self.state, 1)], -1
        )
        x, B, C = (z.unflatten(-1, (self.heads, -1)) for z in (x, B, C))
        dt = F.softplus(dt - 2)
        return ssd(x * dt[..., None], -torch.exp(self.A_log) * dt, B, C, 4)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 10, dtype=dtype)
