"""A scan whose steps draw random numbers: on each rank they would be others."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"refused": r"near_scan_dropout\.py"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        def step(h, now):
            h = 0.5 * h + nn.functional.dropout(now, 0.5)
            return h.clone(), h

        return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
