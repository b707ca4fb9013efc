"""Left-padded batch: keys of padding are zeroed by an attention mask [B, T] of ones and zeros."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, heads=2, dim=3):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(6, 3 * heads * dim)

    def forward(self, x, attention_mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k = k.masked_fill(~attention_mask.bool()[:, None, :, None], 0)
        return (torch.tril(q @ k.mT) @ v).transpose(1, 2).flatten(2) * attention_mask.unsqueeze(-1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, : length // 2 + 1] = 0
    return torch.randn(batch, length, 6, dtype=dtype), mask
