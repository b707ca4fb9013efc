"""Two selective scans, one over the flipped sequence, of padded sequences: the padding is flipped with them, and so is
the causal convolution in front of the second."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel", "per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
WORLD_SIZE = 3


class Direction(nn.Module):
    def __init__(self, width=4, state=2):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.step, self.bc = nn.Linear(width, width), nn.Linear(width, 2 * state)
        self.rates = nn.Parameter(torch.rand(width, state))

    def forward(self, x, mask):
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT) * mask[..., None]
        step = F.softplus(self.step(x))
        decay, update = torch.exp(-step[..., None] * self.rates), step * x
        b, c = self.bc(x).chunk(2, -1)
        h = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1])
        out = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + update[:, t, :, None] * b[:, t, None]
            out.append((h * c[:, t, None]).sum(-1))
        return torch.stack(out, 1)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.forwards, self.backwards, self.out = Direction(), Direction(), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        mask = mask.to(x.dtype)
        there = self.forwards(x, mask)
        back = self.backwards(torch.flip(x, dims=[1]), mask.flip(-1)).flip(-2)
        return self.out(torch.cat([there, back], -1))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    lengths = torch.arange(length, length - batch, -1)
    return torch.randn(batch, length, 4, dtype=dtype), torch.arange(length) < lengths[:, None]
