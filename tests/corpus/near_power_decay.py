"""The decay falls with a power of the distance, 1 / (1 + i - j), not exponentially."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_power_decay\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device, dtype=q.dtype)
        d = i[:, None] - i[None, :]
        return ((q @ k.mT) * torch.where(d >= 0, 1 / (1 + d.abs()), 0.0)) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
