"""A learned decay rate per head, -exp(parameter), times the distance, clamped before exp."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self, heads=4, dim=3):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.to_qkv = nn.Linear(12, 3 * heads * dim)
        self.rate = nn.Parameter(torch.randn(heads) - 2)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, self.dim).unbind(2)
        pos = torch.arange(n, device=x.device)
        distance = (pos[:, None] - pos[None, :]).to(x.dtype)
        decay = torch.exp(-self.rate.exp()[:, None, None] * distance.clamp(min=0)).tril()
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * self.dim**-0.5
        return torch.einsum("bhij,bjhd->bihd", sim * decay, v).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 12, dtype=dtype)
