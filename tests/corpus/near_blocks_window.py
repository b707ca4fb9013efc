"""Block-sparse: blocks of four positions, each sees the five blocks up to its own."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_blocks_window\.py"}
LOCAL_LENGTHS = (14,)


class Model(nn.Module):
    def forward(self, q, k, v):
        i = torch.arange(q.shape[1], device=q.device)
        blocks = i[:, None] // 4 - i[None, :] // 4
        mask = (i[:, None] >= i[None, :]) & (blocks < 5)
        return torch.where(mask, q @ k.mT, 0.0) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
