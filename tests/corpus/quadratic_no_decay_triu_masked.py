"""Mask as in the annotated transformer: triu with k=1, `subsequent == 0`, scores set to zero."""

import math

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


def subsequent_mask(size, device):
    return torch.triu(torch.ones((1, size, size), device=device), diagonal=1).type(torch.uint8) == 0


def attention(query, key, value, mask):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(mask == 0, 0)
    return torch.matmul(scores, value)


class MultiHeaded(nn.Module):
    def __init__(self, h=3, d_model=12):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        nbatches = x.size(0)
        query, key, value = (
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2) for lin in self.linears[:3]
        )
        x = attention(query, key, value, subsequent_mask(x.size(1), x.device).unsqueeze(1))
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


def make_model():
    return MultiHeaded()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 12, dtype=dtype)
