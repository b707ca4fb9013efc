"""S4D in its recurrent form: complex poles, discretised by zero-order hold, the states read in every step."""

import torch
from torch import nn

EXPECTED = {"families": ["complex"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class S4D(nn.Module):
    def __init__(self, width=4, state=3):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) - 2)
        self.log_A_real = nn.Parameter(torch.randn(width, state) / 3)
        self.A_imag = nn.Parameter(torch.pi * torch.arange(state).repeat(width, 1))
        self.C = nn.Parameter(torch.randn(width, state, dtype=torch.cfloat))
        self.D = nn.Parameter(torch.randn(width))

    def forward(self, u):
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dA = torch.exp(A * torch.exp(self.log_dt)[:, None])
        dB = (dA - 1) / A
        x = torch.zeros(u.shape[0], *dA.shape, dtype=dA.dtype)
        y = torch.zeros_like(u)
        for t in range(u.shape[1]):
            x = dA * x + dB * u[:, t, :, None]
            y[:, t] = 2 * torch.einsum("bdn,dn->bd", x, self.C).real
        return y + self.D * u


def make_model():
    return S4D()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
