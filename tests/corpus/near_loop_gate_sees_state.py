"""A cell whose gate looks at the state it decays: not linear, whatever is moved out of the loop."""

import torch
from torch import nn

EXPECTED = {"refused": "sequence"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.gate, self.read, self.value = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        h = x.new_zeros(x.shape[0], x.shape[2])
        out = []
        for t in range(x.shape[1]):
            z = torch.sigmoid(self.gate(x[:, t]) + self.read(h))
            h = (1 - z) * h + z * self.value(x[:, t])
            out.append(self.value(h))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
