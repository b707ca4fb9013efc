"""Cells run over the tokens, but each reads its query from the token at the other end."""

import torch
from torch import nn

EXPECTED = {"refused": "sequence"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, 3), nn.Linear(width, 3), nn.Linear(width, 5)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 3, 5)
        out = []
        for t in range(x.shape[1]):
            state = 0.9 * state + self.k(x[:, t]).unsqueeze(-1) * self.v(x[:, t]).unsqueeze(1)
            out.append((self.q(x[:, -1 - t]).unsqueeze(-1) * state).sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
