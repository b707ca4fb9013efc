"""The decay matrix for the longest sequence as a buffer, cut to length: `self.D[:, :T, :T]`."""

import torch
from torch import nn

EXPECTED = {
    "families": [
        "constant per head",
    ],
    "or_refused": True,
}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, heads=2, dim=3, longest=32):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(6, 3 * heads * dim)
        t = torch.arange(longest)
        distance = (t[:, None] - t[None, :]).float()
        gamma = 1 - 2.0 ** (-3 - torch.arange(heads))
        self.register_buffer("D", (gamma[:, None, None] ** distance.clamp(min=0)).tril(), persistent=False)

    def forward(self, x):
        T = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-1, -2) * self.D[:, :T, :T]) @ v
        return y.transpose(1, 2).flatten(2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
