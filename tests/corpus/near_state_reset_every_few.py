"""A loop that empties its state at every fourth position."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_state_reset_every_few\.py"}
LOCAL_LENGTHS = (8,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            if t % 4 == 0:
                h = torch.zeros_like(h)
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
