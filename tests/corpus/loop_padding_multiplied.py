"""A mask of zeros and ones mixes the new state, a matrix, with the old one; the normaliser too."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g, mask):
        k, m = k.exp(), mask.to(q.dtype)
        S, z = q.new_zeros(q.shape[0], 4, 4), q.new_zeros(q.shape[0], 4)
        out = []
        for t in range(q.shape[1]):
            decay, keep = g[:, t].exp()[:, None], m[:, t, None]
            new = decay[..., None] * S + torch.einsum("bk,bv->bkv", k[:, t], v[:, t])
            S = keep[..., None] * new + (1 - keep[..., None]) * S
            z = keep * (decay * z + k[:, t]) + (1 - keep) * z
            read = torch.einsum("bk,bkv->bv", q[:, t].exp(), S)
            out.append(read / (torch.einsum("bk,bk->b", q[:, t].exp(), z)[:, None] + 1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 3]])
    return q, k, v, -0.3 * torch.rand(batch, length, dtype=dtype), mask
