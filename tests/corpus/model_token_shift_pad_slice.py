"""Token shift by padding and slicing; the *gate* is shifted, so the decay of step t comes from token t-1."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.qkvg = nn.Linear(width, 4 * width)

    def forward(self, x):
        q, k, v, g = self.qkvg(x).chunk(4, -1)
        g = F.pad(F.logsigmoid(g) / 8, (0, 0, 1, 0))[:, :-1]
        c = g.cumsum(1)
        return ((q * c.exp()) @ (k * (-c).exp()).mT).tril() @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
