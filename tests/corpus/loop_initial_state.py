"""A state of an earlier segment is an argument; it has no sequence dimension."""

import torch
from torch import nn

import zeco_compile

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g, state):
        out = []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, :, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    v = torch.randn(batch, length, 3, 5, dtype=dtype)
    g = -0.2 * torch.rand(batch, length, 3, 4, dtype=dtype)
    return q, k, v, g, zeco_compile.mark_sequence(torch.randn(batch, 3, 4, 5, dtype=dtype), None)
