"""Short sequences take another path than long ones; a slice is shorter than the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"where: \S*near_branch_on_length\.py:\d+"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.long(x) if x.shape[1] > 8 else self.short(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
