"""RWKV-4, but the bonus is that of the token before."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_rwkv4_bonus_late\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bonus, self.decay = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.key, self.value, self.receptance = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        k, v, r = self.key(x).exp(), self.value(x), torch.sigmoid(self.receptance(x))
        num, den = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        decay, bonus = torch.exp(-self.decay.exp()), self.bonus.exp()
        out, before = [], torch.zeros_like(num)
        for t in range(x.shape[1]):
            write = k[:, t] * v[:, t]
            out.append(r[:, t] * (num + bonus * before) / (den + bonus * k[:, t]))
            num, den, before = decay * num + write, decay * den + k[:, t], write
        return torch.stack(out, 1)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
