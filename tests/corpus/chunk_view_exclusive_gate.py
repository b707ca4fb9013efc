"""Chunks as an axis; the gate of a position acts behind it, and its own write is read as it is."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (8,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        q, k, v = (x.transpose(1, 2).unflatten(2, (-1, 4)) for x in (q, k, v))
        g = g.transpose(1, 2).unflatten(2, (-1, 4))
        sums = g.cumsum(-1)
        before = sums - g
        inside = (before[..., :, None] - sums[..., None, :]).exp().tril(-1) + torch.eye(4, dtype=q.dtype)
        writes = (k * (sums[..., -1:] - sums).exp()[..., None]).mT @ v
        ends = sums[..., -1].cumsum(-1)
        between = (F.pad(ends, (1, -1))[..., :, None] - ends[..., None, :]).exp().tril(-1)
        states = torch.einsum("bhnm,bhmkv->bhnkv", between, writes)
        o = (q @ k.mT * inside) @ v + (q * before.exp()[..., None]) @ states
        return o.flatten(2, 3).transpose(1, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 2, 4, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 2, 3, dtype=dtype), -torch.rand(batch, length, 2, dtype=dtype)
