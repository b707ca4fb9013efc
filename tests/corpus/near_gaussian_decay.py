"""The decay falls with the square of the distance, with a rate per head that is learned."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_gaussian_decay\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.rate = nn.Parameter(torch.rand(heads))

    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        d = (i[:, None] - i[None, :]) ** 2
        D = torch.exp(-self.rate[:, None, None] * d).tril()
        return torch.einsum("bihd,bjhd,hij,bjhv->bihv", q, k, D, v)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 2, 3, dtype=dtype) for _ in range(3))
