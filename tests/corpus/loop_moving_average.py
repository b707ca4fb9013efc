"""An exponential moving average with a Python constant."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Smooth(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        x = self.proj(x)
        mean = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.size(1)):
            mean = self.momentum * mean + (1 - self.momentum) * x[:, t]
            out.append(mean)
        return torch.stack(out, 1)


def make_model():
    return Smooth()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
