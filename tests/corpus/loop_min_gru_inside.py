"""minGRU as a cell: gate and candidate are computed in the step, and a head reads the hidden state there."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class MinGRUCell(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.candidate = nn.Linear(width, hidden), nn.Linear(width, hidden)

    def forward(self, x, h):
        z = torch.sigmoid(self.gate(x))
        return (1 - z) * h + z * torch.tanh(self.candidate(x))


class Model(nn.Module):
    def __init__(self, width=5, hidden=7):
        super().__init__()
        self.cell, self.head = MinGRUCell(width, hidden), nn.Linear(hidden, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 7, dtype=x.dtype)
        logits = []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            logits.append(self.head(torch.relu(h)))
        return torch.stack(logits, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
