"""A number that follows from the length alone: the mean of arange(T), in a model that loops over it."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_sum_of_positions\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, a, b):
        T = a.shape[1]
        middle = torch.arange(T, dtype=a.dtype).mean()
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(T):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1) * middle


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
