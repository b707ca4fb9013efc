"""A complex recurrence in cumulative products and sums, real and imaginary parts returned."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.nu = nn.Parameter(torch.rand(width) - 2)
        self.theta = nn.Parameter(torch.rand(width))

    def forward(self, x):
        decay = torch.exp(torch.complex(-self.nu.exp(), self.theta)).expand(*x.shape)
        product = torch.cumprod(decay, 1)
        h = product * torch.cumsum(x / product, 1)
        return h.real, h.imag


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
