"""mLSTM without its stabiliser: the input gate stands in the exponent, and the normaliser is at least one."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f):
        decay = torch.nn.functional.logsigmoid(f).cumsum(1)
        C = (q @ k.mT) * torch.exp(decay - decay.mT + i.mT).tril()
        return (C @ v) / C.sum(-1, keepdim=True).abs().clamp(min=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    i, f = (torch.randn(batch, length, 1, dtype=dtype) for _ in range(2))
    return q, k, v, i, f
