"""Heads in front of the batch, [H, B, T, D], with a gate per head; a triangle taken before and after exp."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, heads=3, dim=4):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, heads, 6, dim) / 3)
        self.gate = nn.Parameter(torch.randn(heads, 6) / 3)

    def forward(self, x):
        q, k, v = (torch.einsum("btc,hcd->hbtd", x, w) for w in self.w)
        a = F.logsigmoid(torch.einsum("btc,hc->hbt", x, self.gate) + 3)
        c = a.cumsum(-1)
        L = torch.exp((c[..., :, None] - c[..., None, :]).tril()).tril()
        o = torch.einsum("hbts,hbsd->hbtd", L * torch.einsum("hbtd,hbsd->hbts", q, k), v)
        return o.permute(1, 2, 0, 3).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
