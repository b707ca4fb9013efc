"""No attention: an MLP with a norm and no dropout. Nothing to recognise, nothing to refuse."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (1,)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.net(x), x.softmax(-1).topk(2, dim=-1).values


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
