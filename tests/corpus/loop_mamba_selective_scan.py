"""Mamba-1's selective_scan_ref: state [D, N], discretised A and B given per position."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5, 4)


class S6(nn.Module):
    def __init__(self, width=6, state=4):
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1, dtype=torch.float).repeat(width, 1)))
        self.D = nn.Parameter(torch.ones(width))
        self.x_proj = nn.Linear(width, 2 * state, bias=False)
        self.dt_proj = nn.Linear(width, width)
        nn.init.constant_(self.dt_proj.bias, -3.0)
        self.state = state

    def forward(self, u):
        B, C = self.x_proj(u).split(self.state, -1)
        delta = F.softplus(self.dt_proj(u))
        A = -torch.exp(self.A_log)
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x = A.new_zeros((u.shape[0], u.shape[2], self.state))
        ys = []
        for i in range(u.shape[1]):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
        y = torch.stack(ys, dim=1)
        return y + u * self.D


def make_model():
    return S6()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
