"""Griffin's RG-LRU: log a = -c softplus(L) sigmoid(r), input scaled with sqrt(1 - a^2)."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class RGLRU(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a_param = nn.Parameter(torch.randn(width) - 2)
        self.gates = nn.Linear(width, 2 * width)

    def forward(self, x):
        i, r = self.gates(x).sigmoid().chunk(2, -1)
        log_a = -8.0 * r * F.softplus(self.a_param)
        a = log_a.exp()
        gated = i * x * torch.sqrt(1 - (2 * log_a).exp())
        h = x.new_zeros(x.shape[0], x.shape[2])
        y = x.new_zeros(x.shape)
        for t in range(x.shape[1]):
            h = a[:, t] * h + gated[:, t]
            y[:, t] = h
        return y


def make_model():
    return RGLRU()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
