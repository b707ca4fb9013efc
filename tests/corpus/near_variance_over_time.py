"""Instance normalisation: mean and variance of every channel over the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_variance_over_time\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4)

    def forward(self, x):
        return self.norm(x.mT).mT, x.var(dim=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
