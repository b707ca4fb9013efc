"""One projection serves as query and key (as Reformer's), and values are the input itself."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(6, 4)

    def forward(self, x):
        z = self.qk(x)
        return torch.tril(z @ z.mT) @ x


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
