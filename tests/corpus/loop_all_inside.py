"""Everything happens in the step: projections, norm, a gate of its own kind, output gate and projection."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Cell(nn.Module):
    def __init__(self, width=6, heads=2, key=3, value=4):
        super().__init__()
        self.heads, self.key = heads, key
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.g = (nn.Linear(width, heads * key) for _ in range(3))
        self.v, self.z = nn.Linear(width, heads * value), nn.Linear(width, heads * value)
        self.out = nn.Linear(heads * value, width)

    def forward(self, x, state):
        y = self.norm(x)
        q, k, g = (f(y).view(x.shape[0], self.heads, self.key) for f in (self.q, self.k, self.g))
        q, k = q.softmax(-1), F.normalize(k, dim=-1)
        v = self.v(y).unflatten(-1, (self.heads, -1))
        state = state * (F.logsigmoid(g) / 16).exp()[..., None] + k[..., None] * v[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", q, state).flatten(1)
        return x + self.out(o * F.silu(self.z(y))), state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 2, 3, 4)
        outputs = []
        for t in range(x.shape[1]):
            y, state = self.cell(x[:, t], state)
            outputs.append(y)
        return torch.stack(outputs, dim=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
