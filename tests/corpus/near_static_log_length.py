"""Scales with the logarithm of the length in a model that loops over it: no reduction is near."""

import math

import torch
from torch import nn

EXPECTED = {"refused": r"near_static_log_length\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, a, b):
        T = a.shape[1]
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(T):
            h = a[:, t] * h + b[:, t] / math.log(1 + T)
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
