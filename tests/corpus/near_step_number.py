"""The step's number enters the loop: a running mean, m += (x - m) / (t + 1)."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_step_number\.py"}
LOCAL_LENGTHS = (5, 2)


class Model(nn.Module):
    def forward(self, x):
        mean = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            mean = mean + (x[:, t] - mean) / (t + 1)
            out.append(mean)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
