"""GroupNorm over [B, C, T]: every group is normalised over all positions."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_group_norm\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x):
        return self.norm(x.mT).mT


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
