"""Every size equals the local length: axes must not be told by size."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        c = g.cumsum(1).transpose(1, 2)
        A = torch.einsum("bihd,bjhd,bhijd->bhij", q, k, (c[:, :, :, None] - c[:, :, None]).exp())
        return torch.einsum("bhij,bjhd->bihd", A.tril(), v)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(4, length, 4, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(4, length, 4, 4, dtype=dtype)
