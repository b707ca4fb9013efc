"""Mega's moving average: each channel has a few states, read out in the loop by an einsum with a parameter."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay, self.write, self.read = (nn.Parameter(torch.randn(6, 3)) for _ in range(3))

    def forward(self, x):
        h = torch.zeros(x.shape[0], 6, 3, dtype=x.dtype)
        out = []
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.decay) * h + self.write * x[:, t, :, None]
            out.append(torch.einsum("bdn,dn->bd", h, self.read))
        return torch.stack(out, 1)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
