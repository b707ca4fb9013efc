"""A loop that reads the state before it writes, and returns what the last token leaves behind, too."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (4, 8)


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(8, 8)
        self.heads = heads

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        a = torch.sigmoid(self.gate(x) + 2).unflatten(-1, (self.heads, -1))
        S = x.new_zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            outputs.append((q[:, t, :, None] @ S).squeeze(-2))
            S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        return self.out(torch.stack(outputs, 1).flatten(2)), S


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
