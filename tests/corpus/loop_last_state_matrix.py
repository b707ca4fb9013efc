"""Matrix states that only a query of the last token reads, and their normaliser; the state is updated in place."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (5,), (3, 8)


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.gate, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k = q.exp(), k.exp()
        a = torch.sigmoid(self.gate(x) + 2).unflatten(-1, (self.heads, -1))
        S = x.new_zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1])
        z = torch.zeros_like(k[:, 0])
        for t in range(x.shape[1]):
            S.mul_(a[:, t, :, :, None]).add_(k[:, t, :, :, None] * v[:, t, :, None])
            z = a[:, t] * z + k[:, t]
        read = torch.einsum("bhk,bhkv->bhv", q[:, -1], S)
        return read / (q[:, -1] * z).sum(-1, keepdim=True)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
