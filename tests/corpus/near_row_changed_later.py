"""The first token as a view of what is changed later on."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_row_changed_later\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x) * 1
        first, front = y[:, 0], y[:, :1]
        y.mul_(2)
        return x.transpose(0, 1) + first, x + front


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
