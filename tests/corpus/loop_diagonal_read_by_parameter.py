"""A diagonal state space as a cell: input and output are weighed by parameters, a skip goes around it."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, width=4, state=3):
        super().__init__()
        self.log_a = nn.Parameter(-torch.rand(width, state))
        self.B, self.C = nn.Parameter(torch.randn(width, state)), nn.Parameter(torch.randn(width, state))
        self.D = nn.Parameter(torch.randn(width))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        h = torch.zeros(x.shape[0], *self.B.shape, dtype=x.dtype)
        out = []
        for t in range(x.shape[1]):
            u = x[:, t]
            h = h * self.log_a.exp() + self.B * u[..., None]
            out.append(self.mix(torch.nn.functional.gelu((h * self.C).sum(-1) + self.D * u)))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
