"""Sum over x.shape[1] in a model that loops over the length: the 1 / T is a constant of the slice."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, a, b):
        T = a.shape[1]
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(T):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        y = self.inner(torch.stack(out, 1))
        return y.sum(1) / T


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
