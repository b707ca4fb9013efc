"""A cell that scales its key in place, after a view of it was taken: each step needs a key of its own."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"], "or_refused": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.k = nn.Linear(width, 3)
        self.v = nn.Linear(width, 5)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 3, 5)
        out = []
        for t in range(x.shape[1]):
            k, again = self.k(x[:, t]), self.k(x[:, t])
            rows = k.unsqueeze(-1)
            rows.mul_(0.5)
            decay = torch.sigmoid(again[:, :1] * 0.1)
            state = state * decay.unsqueeze(-1) + rows * self.v(x[:, t]).unsqueeze(1)
            out.append((again.unsqueeze(-1) * state).sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
