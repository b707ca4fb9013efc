"""`associative_scan` of what is no associative function: its result depends on how PyTorch groups the tokens."""

import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

EXPECTED = {"refused": r"near_scan_not_associative\.py.*not associative"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, a, b):
        def combine(left, right):  # the decays are not multiplied
            return right[0], left[1] * right[0] + right[1]

        return associative_scan(combine, (a.sigmoid(), b), dim=1, combine_mode="generic")[1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
