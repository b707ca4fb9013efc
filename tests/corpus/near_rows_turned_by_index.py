"""All rows in another order, by an index that is as long as the sequence."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_rows_turned_by_index\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, x):
        return x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
