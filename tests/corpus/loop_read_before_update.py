"""The state is read before the step's own outer product is added (and no bonus term is given)."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (4,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        out = torch.zeros_like(v)
        for t in range(q.shape[1]):
            out[:, t] = torch.einsum("bk,bkv->bv", q[:, t], S)
            S = g[:, t, :, None].exp() * S + k[:, t, :, None] * v[:, t, None, :]
        return out


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 3, dtype=dtype), -0.3 * torch.rand(batch, length, 4, dtype=dtype)
