"""Reads out with an einsum, and gives the state after the last token transposed, before the output is put together."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        S = torch.zeros(q.shape[0], 4, 4, dtype=q.dtype)
        out = []
        for t in range(q.shape[1]):
            S = torch.exp(g[:, t]).unsqueeze(-1) * S + torch.einsum("bk,bv->bkv", k[:, t], v[:, t])
            out.append(torch.einsum("bk,bkv->bv", q[:, t], S))
        return S.transpose(1, 2), torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, 4, dtype=dtype)
