"""Two real states that rotate into each other, where one complex state is meant."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_rotation_in_reals\.py.*write it in complex numbers"}
LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Parameter(torch.rand(width) / 2)
        self.b = nn.Parameter(torch.rand(width) / 2)

    def forward(self, u, v):
        re = im = torch.zeros_like(u[:, 0])
        ys = []
        for t in range(u.shape[1]):
            re, im = self.a * re - self.b * im + u[:, t], self.b * re + self.a * im + v[:, t]
            ys.append(re + im)
        return torch.stack(ys, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
