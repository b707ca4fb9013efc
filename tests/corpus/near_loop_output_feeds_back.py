"""A cell whose projected output is a part of the next step's input: a recurrence, but no linear attention."""

import torch
from torch import nn

EXPECTED = {"refused": "sequence"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.k, self.v, self.out = nn.Linear(width, 3), nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 3, 5)
        before = x.new_zeros(x.shape[0], x.shape[2])
        out = []
        for t in range(x.shape[1]):
            y = x[:, t] + 0.1 * before
            state = 0.9 * state + self.k(y).unsqueeze(-1) * self.v(y).unsqueeze(1)
            before = self.out(state.sum(1))
            out.append(before)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
