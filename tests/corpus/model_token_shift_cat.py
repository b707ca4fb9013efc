"""Token shift with torch.cat of zeros and all tokens but the last, before a gated loop."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(width))
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        x = x + self.mix * (previous - x)
        a, b = torch.sigmoid(self.a(x) + 2), self.b(x)
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
