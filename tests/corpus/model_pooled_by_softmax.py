"""Pooling with a softmax over time, log-sum-exp, norms, deviations and extremes over the sequence."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.query = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        y = self.inner(x)
        pooled = (y[..., :1].softmax(1) * x).sum(1) + torch.logsumexp(y, 1)
        attended = (torch.softmax(self.query @ y.mT, -1) @ x)[:, 0]
        spread = (
            y.std(1)
            + y.var(1, unbiased=False)
            + torch.var_mean(y, 1)[1]
            + y.amax(1)
            - y.clamp(-0.1, 0.1).amin(1)
        )
        unit = F.normalize(y, dim=1) + y.log_softmax(1)
        return pooled + attended + spread, unit, y.sum() / y.numel() + y.norm()


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
