"""Mamba's selective scan as minimal implementations write it: the decay is made of the token's step size in a step."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, features=6, state=4):
        super().__init__()
        self.x_proj = nn.Linear(features, 2 * state)
        self.dt_proj = nn.Linear(features, features)
        self.A_log = nn.Parameter(torch.rand(features, state))
        self.D = nn.Parameter(torch.ones(features))

    def forward(self, x):
        B, C = self.x_proj(x).chunk(2, -1)
        dt = F.softplus(self.dt_proj(x))
        A = -torch.exp(self.A_log)
        h = x.new_zeros(x.shape[0], x.shape[2], B.shape[2])
        ys = []
        for t in range(x.shape[1]):
            dA = torch.exp(dt[:, t].unsqueeze(-1) * A)
            dB = dt[:, t].unsqueeze(-1) * B[:, t].unsqueeze(1)
            h = dA * h + dB * x[:, t].unsqueeze(-1)
            ys.append((h * C[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(ys, 1) + x * self.D


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
