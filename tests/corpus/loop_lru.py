"""The linear recurrent unit: complex poles from parameters, normalised inputs, the real part of what is read."""

import torch
from torch import nn

EXPECTED = {"families": ["complex"]}
LOCAL_LENGTHS = (5, 2)


class LRU(nn.Module):
    def __init__(self, width=4, state=3):
        super().__init__()
        self.nu_log = nn.Parameter(torch.rand(state) - 2.5)
        self.theta_log = nn.Parameter(torch.rand(state))
        self.B = nn.Parameter(torch.randn(state, width, dtype=torch.cfloat))
        self.C = nn.Parameter(torch.randn(width, state, dtype=torch.cfloat))
        self.D = nn.Parameter(torch.randn(width))

    def forward(self, x):
        Lambda = torch.exp(torch.complex(-self.nu_log.exp(), self.theta_log.exp()))
        gamma = torch.sqrt(1 - Lambda.abs() ** 2)
        h = torch.zeros(x.shape[0], Lambda.shape[0], dtype=Lambda.dtype)
        ys = []
        for t in range(x.shape[1]):
            h = Lambda * h + gamma * (x[:, t].to(Lambda.dtype) @ self.B.T)
            ys.append((h @ self.C.T).real + self.D * x[:, t])
        return torch.stack(ys, 1)


def make_model():
    return LRU()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
