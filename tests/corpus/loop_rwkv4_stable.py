"""RWKV-4 as it is run: both sums are multiples of exp(-pp), the largest exponent so far, so that no exponential is
larger than one."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bonus, self.decay = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        k, v = self.key(x), self.value(x)
        aa, bb = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        pp = torch.zeros_like(k[:, 0]) - 1e38
        out = []
        for t in range(x.shape[1]):
            ww = self.bonus + k[:, t]
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
            ww = pp - torch.exp(self.decay)
            p = torch.maximum(ww, k[:, t])
            e1, e2 = torch.exp(ww - p), torch.exp(k[:, t] - p)
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
        return torch.stack(out, 1)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return 3 * torch.randn(batch, length, 4, dtype=dtype)
