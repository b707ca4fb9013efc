"""The window is a number in a buffer, where no constant of the graph shows it."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_band_in_buffer\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.tensor(7))

    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        d = i[:, None] - i[None, :]
        return ((q @ k.mT) * ((d >= 0) & (d < self.window))) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
