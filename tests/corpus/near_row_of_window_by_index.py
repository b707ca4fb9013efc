"""A row by its number among those without the first."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_row_of_window_by_index\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        kept = (x.detach()[..., 0] < 0.5).sum(1)
        return x[:, 1:][torch.arange(x.shape[0], device=x.device), (kept - 2).clamp(min=0)]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
