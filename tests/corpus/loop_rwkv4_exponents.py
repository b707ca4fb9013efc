"""RWKV-4 with both sums from one tensor of zeros, and the bonus in the exponent beside the key: nobody reads what
the last step would write."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (4,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bonus, self.decay = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        k, v = self.key(x), self.value(x)
        decay = torch.exp(-self.decay.exp())
        num = den = torch.zeros_like(k[:, 0])
        out = []
        for t in range(x.shape[1]):
            own = torch.exp(self.bonus + k[:, t])
            out.append((num + own * v[:, t]) / (den + own))
            write = torch.exp(k[:, t])
            num, den = decay * num + write * v[:, t], decay * den + write
        return torch.stack(out, 1)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
