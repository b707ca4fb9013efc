"""L2 norm of every feature over the sequence."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_norm_over_time\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
