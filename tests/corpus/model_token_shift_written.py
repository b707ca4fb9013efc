"""Token shift in the way of many RWKV ports: the tokens before, written into zeros; and the ones after, for a gate."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        before = torch.zeros_like(x)
        before[:, 1:] = x[:, :-1]
        after = x.new_zeros(x.shape)
        after[:, :-2] = x[:, 2:]
        x = x * self.mix + before * (1 - self.mix)
        y = torch.tril(self.q(x) @ self.k(x).mT) @ self.v(x)
        return y * torch.sigmoid(after)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
