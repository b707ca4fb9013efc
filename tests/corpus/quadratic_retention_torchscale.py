"""RetNet as in torchscale (without its normaliser): decay mask from arange, inf where masked, nan_to_num."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS = (5,)


class Retention(nn.Module):
    def __init__(self, heads=3, key=4, value=5):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(8, heads * (2 * key + value), bias=False)
        self.split = [heads * key, heads * key, heads * value]
        decay = torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float)))
        self.register_buffer("decay", decay)

    def forward(self, x):
        bsz, slen, _ = x.size()
        index = torch.arange(slen).to(self.decay)
        mask = torch.tril(torch.ones(slen, slen).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.exp(mask * self.decay[:, None, None])
        mask = torch.nan_to_num(mask)
        q, k, v = (
            t.view(bsz, slen, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(self.split, -1)
        )
        qk_mat = q @ k.transpose(-1, -2)
        qk_mat = qk_mat * mask
        output = torch.matmul(qk_mat, v)
        return output.transpose(1, 2).flatten(2)


def make_model():
    return Retention()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
