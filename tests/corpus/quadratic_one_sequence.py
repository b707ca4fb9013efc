"""One sequence, no heads, a gate of one number per position, and scores divided by the length."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (6,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        sums = F.logsigmoid(x[..., 0]).cumsum(1)
        decays = (sums[:, :, None] - sums[:, None, :]).exp().tril()
        scores = self.query(x) @ self.key(x).mT / x.shape[1]
        return (scores * decays) @ self.value(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(1, length, 5, dtype=dtype)
