"""A loop over the chunks of a sequence that is padded to whole chunks, and cut off: as it is, and with a residual of
the padded values. The slice is padded by three rows, the whole sequence by two."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 1)

    def forward(self, x, pad):
        rows = (*self.qkv(x).chunk(3, -1), F.logsigmoid(self.gate(x)))
        q, k, v, g = (F.pad(part, (0, 0, 0, pad)).unflatten(1, (-1, 4)) for part in rows)
        sums = g.squeeze(-1).cumsum(-1)
        decays = (sums[..., :, None] - sums[..., None, :]).exp().tril()
        inside = (q @ k.mT * decays) @ v
        writes = (k * (sums[..., -1:] - sums).exp()[..., None]).mT @ v
        state, out = torch.zeros_like(writes[:, 0]), []
        for n in range(q.shape[1]):
            out.append(inside[:, n] + q[:, n] * sums[:, n, :, None].exp() @ state)
            state = state * sums[:, n, -1, None, None].exp() + writes[:, n]
        return torch.cat(out, 1)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = Layer(width), Layer(width)
        self.skip = nn.Parameter(torch.randn(width))

    def forward(self, x):
        length = x.shape[1]
        pad = -length % 4
        x = torch.tanh(self.first(x, pad)[:, :length])
        return (self.second(x, pad) + self.skip * F.pad(x, (0, 0, 0, pad)))[:, :length]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
