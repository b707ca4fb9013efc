"""A complex state that is reset where it is larger than any number that a check would try."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_complex_reset_far\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * torch.where(h.abs() > 1e9, torch.zeros_like(h), h) + b[:, t]
            out.append(h)
        return torch.view_as_real(torch.stack(out, 1))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    size, phase = torch.rand(2, batch, length, 4, dtype=dtype)
    u = torch.randn(batch, length, 4, dtype=dtype) * 1e9
    return torch.polar(1 - 0.3 * size, phase), torch.complex(u, u * 0.5)
