"""FNet's mixing: the real part of a Fourier transform along the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"(?s)near_fft\.py.*complex numbers"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x, dim=1).real


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
