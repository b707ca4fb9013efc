"""Padded tokens leave the state as it is, and the decay is a parameter: there is nothing of a step in `a * h`."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.rand(width) * 0.5 + 0.3)

    def forward(self, x, mask):
        x = self.inner(x)
        h, smoothed = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t, None], 0.9 * h + x[:, t], h)
            smoothed.append(h)
        x = torch.stack(smoothed, 1)
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            real = mask[:, t, None].to(x.dtype)
            h = real * (self.decay * h + x[:, t]) + (1 - real) * h
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, length, 4, dtype=dtype), torch.rand(batch, length, generator=generator) > 0.3
