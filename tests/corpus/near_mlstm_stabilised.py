"""mLSTM with its stabiliser, the largest exponent of a row."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_mlstm_stabilised\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f):
        decay = torch.nn.functional.logsigmoid(f).cumsum(1)
        D = (decay - decay.mT + i.mT).masked_fill(torch.ones_like(q @ k.mT).tril() == 0, -torch.inf)
        top = D.amax(-1, keepdim=True)
        C = (q @ k.mT) * torch.exp(D - top)
        return (C @ v) / torch.maximum(C.sum(-1, keepdim=True).abs(), torch.exp(-top))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    i, f = (torch.randn(batch, length, 1, dtype=dtype) for _ in range(2))
    return q, k, v, i, f
