"""A padded token leaves the state as it was two steps before."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_padding_other_state\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, x, mask):
        older = h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            older, h = h, torch.where(mask[:, t, None], 0.9 * h + x[:, t], 0.9 * older)
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, length, 4, dtype=dtype), torch.rand(batch, length, generator=generator) > 0.3
