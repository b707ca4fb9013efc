"""`associative_scan` in its generic mode: an elementwise recurrence, and one of matrices with a decay for each head."""

import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1, 4)


def combine(left, right):
    (a, b), (c, d) = left, right
    return a * c, b * c + d


class Model(nn.Module):
    def __init__(self, width=6, heads=2):
        super().__init__()
        self.heads = heads
        self.elementwise = nn.Linear(width, 2 * width)
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, heads)

    def forward(self, x):
        a, b = self.elementwise(x).chunk(2, -1)
        x = x + associative_scan(combine, (a.sigmoid(), b), dim=1, combine_mode="generic")[1]
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        decay = self.gate(x).sigmoid()[..., None, None]
        written = k.unsqueeze(-1) * v.unsqueeze(-2)
        _, state = associative_scan(combine, (decay, written), dim=1, combine_mode="generic")
        return torch.einsum("bthk,bthkv->bthv", q, state)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
