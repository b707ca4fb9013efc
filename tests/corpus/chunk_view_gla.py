"""A gate per channel, chunks as an axis; the state goes from chunk to chunk in a loop."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS = (6,)
CHUNK = 3


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.gate = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        h, n = self.heads, t // CHUNK
        q, k, v, g = (
            f(x).view(b, n, CHUNK, h, d // h).permute(0, 3, 1, 2, 4)
            for f in (self.q, self.k, self.v, self.gate)
        )
        g = torch.nn.functional.logsigmoid(g).cumsum(3)
        state = x.new_zeros(b, h, d // h, d // h)
        before = []
        for i in range(n):
            before.append(state)
            last = g[:, :, i, -1:]
            keys = k[:, :, i] * (last - g[:, :, i]).exp()
            state = state * last.transpose(-1, -2).exp() + keys.transpose(-1, -2) @ v[:, :, i]
        o = (q * g.exp()) @ torch.stack(before, dim=2)
        scores = (q * g.exp()) @ (k * (-g).exp()).transpose(-1, -2)
        o = o + scores.tril() @ v
        return o.permute(0, 2, 3, 1, 4).reshape(b, t, d)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
