"""Beside a loop the last six rows of its output, of slices with as many or fewer."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_loop_end_rows\.py[\s\S]*it takes 6 rows", "or_equal": True}
LOCAL_LENGTHS = (5, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return self.inner(torch.stack(out, 1)[:, -6:]).mean(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
