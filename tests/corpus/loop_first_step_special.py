"""The first step writes twice as much: on a slice that is not the first, it must not."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = b[:, 0] * 2, []
        out.append(h)
        for t in range(1, a.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
