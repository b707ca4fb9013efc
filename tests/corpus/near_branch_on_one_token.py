"""Decoding: a single token takes another path. A slice of one token is not a sequence of one."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_branch_on_one_token\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decode, self.prefill = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.decode(x) if x.shape[1] == 1 else self.prefill(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
