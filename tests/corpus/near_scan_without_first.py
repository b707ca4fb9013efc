"""A scan over the tokens but the first: its rows are not those of the sequence."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"refused": r"near_scan_without_first\.py"}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x):
        def step(h, now):
            h = 0.5 * h + now
            return h.clone(), h

        return scan(step, x[:, 0].clone(), x[:, 1:], dim=1)[1].sum(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
