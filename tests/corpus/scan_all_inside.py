"""`scan` whose body projects its token, writes in place, divides by a normaliser and normalises; both states return."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=6, heads=2, key=3):
        super().__init__()
        self.heads, self.key = heads, key
        self.qkv = nn.Linear(width, 3 * heads * key)
        self.gate = nn.Linear(width, heads)
        self.norm = nn.LayerNorm(key)

    def forward(self, x):
        B = x.shape[0]

        def step(carry, token):
            state, total = carry
            q, k, v = self.qkv(token).view(B, 3, self.heads, self.key).unbind(1)
            q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
            a = torch.sigmoid(self.gate(token) + 2)
            state = state * a[..., None, None]
            state += torch.einsum("bhk,bhv->bhkv", k, v)
            total = a[..., None] * total + k
            o = torch.einsum("bhk,bhkv->bhv", q, state) / (q * total).sum(-1, keepdim=True)
            return (state.clone(), total.clone()), self.norm(o).flatten(1)

        initial = (x.new_zeros(B, self.heads, self.key, self.key), x.new_zeros(B, self.heads, self.key))
        (state, total), o = scan(step, initial, x, dim=1)
        return o, state, total


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
