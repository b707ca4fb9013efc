"""LayerNorm over [T, C] with a table of its own for every position (nn.LayerNorm((T, C)) without weights)."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_layer_norm_over_time\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def forward(self, x):
        return F.layer_norm(x, x.shape[1:])


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
