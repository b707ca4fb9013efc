"""`scan` whose steps read the state before they write into it."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=6, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, heads)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))

        def step(state, now):
            q, k, v, a = now
            o = (state @ q.unsqueeze(-1)).squeeze(-1)
            return a[..., None, None] * state + v.unsqueeze(-1) * k.unsqueeze(-2), o

        initial = x.new_zeros(x.shape[0], self.heads, v.shape[-1], k.shape[-1])
        return scan(step, initial, (q, k, v, self.gate(x).sigmoid()), dim=1)[1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
