"""Padded tokens leave the state alone: chosen by `torch.where`, gate and write inside of the step."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        h = x.new_zeros(x.shape[0], x.shape[2])
        out = []
        for t in range(x.shape[1]):
            z = torch.sigmoid(self.gate(x[:, t]))
            h = torch.where(mask[:, t].unsqueeze(-1), z * h + (1 - z) * self.value(x[:, t]), h)
            out.append(torch.tanh(h))
        return torch.stack(out, 1), h


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 3]])
    return torch.randn(batch, length, 4, dtype=dtype), mask
