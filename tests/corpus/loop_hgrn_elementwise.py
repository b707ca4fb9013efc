"""HGRN: an elementwise recurrence h = f * h + (1 - f) * i, channel by channel."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class HGRU(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.input, self.forget, self.output = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        i = F.silu(self.input(x))
        f = torch.sigmoid(self.forget(x) + 2)
        h = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        hs = []
        for t in range(x.shape[1]):
            h = f[:, t] * h + (1 - f[:, t]) * i[:, t]
            hs.append(h)
        return torch.stack(hs, dim=1) * torch.sigmoid(self.output(x))


def make_model():
    return HGRU()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
