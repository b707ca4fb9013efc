"""The decay's strength depends on the step's number, a ** (1 + t % 2)."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_step_number_in_gate\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] ** (1 + t % 2) * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
