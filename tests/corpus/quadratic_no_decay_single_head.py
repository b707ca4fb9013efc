"""The shortest linear attention there is: one head, no head axis, tril of the scores."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (
    7,
    1,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(7, 6)

    def forward(self, x):
        return torch.tril(self.q(x) @ self.k(x).mT) @ self.v(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 7, dtype=dtype)
