"""Every third step writes whatever the mask says."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_mask_in_some_steps\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, x, mask):
        a, h = x.sigmoid(), torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            new = a[:, t] * h + x[:, t]
            h = torch.where(mask[:, t, None], new, h) if t % 3 < 2 else new
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 3]])
    return torch.randn(batch, length, 4, dtype=dtype), mask
