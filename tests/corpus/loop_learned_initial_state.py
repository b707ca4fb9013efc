"""Begins with a state that is a parameter, and returns the one after the last token, read out with bmm."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (3,)
MORE_LOCAL_LENGTHS = (2, 7)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.initial = nn.Parameter(torch.randn(4, 4))

    def forward(self, q, k, v, g):
        S = self.initial.expand(q.shape[0], -1, -1)
        out = []
        for t in range(q.shape[1]):
            S = torch.exp(g[:, t])[:, None, None] * S + torch.bmm(k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
            out.append(torch.bmm(q[:, t].unsqueeze(1), S))
        return torch.cat(out, 1), S


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, dtype=dtype)
