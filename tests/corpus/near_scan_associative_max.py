"""`associative_scan` of a maximum: associative, and not linear."""

import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

EXPECTED = {"refused": r"near_scan_associative_max\.py"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        return associative_scan(torch.maximum, x, dim=1, combine_mode="generic")


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
