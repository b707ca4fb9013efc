"""A real diagonal state space with constant poles: x = A * x + B u, y = C x."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class S4DReal(nn.Module):
    def __init__(self, width=5, state=4):
        super().__init__()
        self.log_A_real = nn.Parameter(torch.log(0.1 + torch.rand(width, state)))
        self.B = nn.Parameter(torch.randn(width, state))
        self.C = nn.Parameter(torch.randn(width, state))

    def forward(self, u):
        A = torch.exp(-torch.exp(self.log_A_real))
        x = u.new_zeros(u.shape[0], *A.shape)
        y = torch.zeros_like(u)
        for t in range(u.shape[1]):
            x = A * x + self.B * u[:, t, :, None]
            y[:, t] = (self.C * x).sum(-1)
        return y


def make_model():
    return S4DReal()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
