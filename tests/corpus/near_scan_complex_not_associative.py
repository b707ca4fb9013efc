"""What combines two values gives the recurrence in order, and something else in a tree: a conjugate in the product."""

import torch
from torch import nn
from torch._higher_order_ops import associative_scan

EXPECTED = {"refused": r"near_scan_complex_not_associative\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, x, size, angle):
        def combine(left, right):
            return left[0] * right[0].conj(), right[0] * left[1] + right[1]

        values = torch.polar(size, angle), x.to(torch.complex128)
        return associative_scan(combine, values, dim=1, combine_mode="generic")[1].real


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    x, angle = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return x, torch.rand(batch, length, 4, dtype=dtype), angle
