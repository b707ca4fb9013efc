"""Hyena's convolution with a learned filter as long as the sequence, through rfft and irfft."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_long_convolution_fft\.py"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self, width=4, longest=32):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width, longest) / 8)

    def forward(self, x):
        T = x.shape[1]
        u = torch.fft.rfft(x.transpose(1, 2), n=2 * T)
        k = torch.fft.rfft(self.filter[:, :T], n=2 * T)
        return torch.fft.irfft(u * k, n=2 * T)[..., :T].transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
