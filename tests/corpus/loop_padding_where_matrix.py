"""Padded tokens leave a state alone that is a matrix; the state after the last one is returned."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g, mask):
        S = q.new_zeros(q.shape[0], 4, 4)
        out = []
        for t in range(q.shape[1]):
            new = S * g[:, t].exp()[:, None, None] + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
            S = torch.where(mask[:, t, None, None], new, S)
            out.append((q[:, t].unsqueeze(1) @ S)[:, 0])
        return torch.stack(out, 1), S


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 3]])
    return q, k, v, -0.3 * torch.rand(batch, length, dtype=dtype), mask
