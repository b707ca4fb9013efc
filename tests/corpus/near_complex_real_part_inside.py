"""Only the real part of a complex state decays."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_complex_real_part_inside\.py.*real part"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(width, dtype=torch.cfloat) / 3)

    def forward(self, x):
        u = torch.complex(x, x.roll(1, 2))
        h, hs = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            h = self.decay * h.real + u[:, t]
            hs.append(h)
        return torch.stack(hs, 1).real


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
