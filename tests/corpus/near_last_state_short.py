"""The state that a loop leaves behind before the last token: nobody reads what the last one would have written."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_last_state_short\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (5,), (3,)


class Model(nn.Module):
    def forward(self, a, b):
        h = torch.zeros_like(b[:, 0])
        for t in range(a.shape[1] - 1):
            h = a[:, t] * h + b[:, t]
        return h


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
