"""A table of positions read step by step, self.pos[t], in a loop that makes the length a constant."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_table_by_step\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(32, 4))

    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t] * self.pos[t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
