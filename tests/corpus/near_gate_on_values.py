"""The decay acts on the state's value side, not on its key side (as GLA's beta)."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, b):
        S, out = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
        for t in range(k.shape[1]):
            S = b[:, t, None, :] * S + k[:, t, :, None] * v[:, t, None, :]
            out.append(torch.einsum("bk,bkv->bv", q[:, t], S))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, dtype=dtype) for _ in range(2))
    v = torch.randn(batch, length, 4, dtype=dtype)
    return q, k, v, 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype)
