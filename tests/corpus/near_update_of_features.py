"""Half of the features of each token get those of the token before, in place."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_update_of_features\.py", "or_equal": True}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        y[:, 1:, :2] += x[:, :-1, 2:]
        return y


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
