"""A token shift, forwards and backwards, written as updates of rows in place; features and rows at the ends, scaled."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (3,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y, z = self.inner(x), self.other(x)
        y[:, 1:] += z[:, :-1]
        y[:, 2:] *= x[:, :-2]
        y[:, 1:-1] -= z[:, 2:]
        y[:, :-1] = y[:, :-1] + y[:, 1:].clone()
        y[:, -2:] *= self.scale
        y[:, 0] -= 2
        y[..., 0] *= z[..., 1]
        y.view(*y.shape[:2], 2, 2)[:, :, 1] /= 2 + z[..., 2:].tanh()
        return y


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
