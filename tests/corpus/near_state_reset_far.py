"""A state that is reset where it is larger than any number that a check would try."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_state_reset_far\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * torch.where(h.abs() > 1e9, 0.0, h) + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(
        batch, length, 4, dtype=dtype
    ) * 1e9
