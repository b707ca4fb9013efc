"""Linear attention as a cell that carries its normaliser beside its state, and divides by it."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["none", "none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=6, heads=2, head=3):
        super().__init__()
        self.heads, self.head = heads, head
        self.q, self.k, self.v = (nn.Linear(width, heads * head) for _ in range(3))
        self.out = nn.Linear(heads * head, width)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], self.heads, self.head, self.head)
        z = x.new_zeros(x.shape[0], self.heads, self.head)
        out = []
        for t in range(x.shape[1]):
            q, k, v = (f(x[:, t]).view(-1, self.heads, self.head) for f in (self.q, self.k, self.v))
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = state + torch.einsum("bhk,bhv->bhkv", k, v)
            z = z + k
            o = torch.einsum("bhk,bhkv->bhv", q, state) / ((q * z).sum(-1, keepdim=True) + 1e-6)
            out.append(self.out(o.flatten(1)))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
