"""A gated recurrence whose decay is zero at the first token of each document (RecurrentGemma's RG-LRU)."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class RGLRU(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, positions):
        reset = positions[:, :, None] == 0
        log_a = -nn.functional.softplus(self.gate(x))
        a = log_a.exp() * ~reset
        b = self.value(x) * (reset + ~reset * torch.sqrt(1 - (2 * log_a).exp()))
        h = x.new_zeros(x.shape[0], x.shape[2])
        y = torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = a[:, t] * h + b[:, t]
            y[:, t] = h
        return y


def make_model():
    return RGLRU()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype), torch.arange(length).expand(batch, length).fmod(3)
