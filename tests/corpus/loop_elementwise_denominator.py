"""RWKV-4 without the bonus: read after the write, numerator over denominator, element by element."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4))
        self.key, self.value, self.receptance = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        k, v, r = self.key(x).exp(), self.value(x), torch.sigmoid(self.receptance(x))
        num, den = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        decay = torch.exp(-self.decay.exp())
        out = []
        for t in range(x.shape[1]):
            write = k[:, t] * v[:, t]
            num, den = decay * num + write, decay * den + k[:, t]
            out.append(r[:, t] * num / den)
        return torch.stack(out, 1)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
