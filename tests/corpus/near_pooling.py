"""Average pooling in pairs along the sequence."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_pooling\.py", "or_equal": True}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        return F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
