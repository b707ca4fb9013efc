"""An Elman RNN: the state goes through tanh."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_tanh_rnn\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.cell = nn.RNNCell(width, width)

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
