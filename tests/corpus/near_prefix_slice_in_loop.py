"""A loop over the first five tokens, x[:, :5], where a slice has just five."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_prefix_slice_in_loop\.py"}
LOCAL_LENGTHS = (5, 4)


class Model(nn.Module):
    def forward(self, a, b):
        a, b = a[:, :5], b[:, :5]
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
