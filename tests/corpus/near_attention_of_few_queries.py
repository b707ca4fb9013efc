"""Learned queries against all positions, by nn.MultiheadAttention: its result is of no position."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_attention_of_few_queries\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        queries = self.query.expand(x.shape[0], 3, 8)
        return self.attention(queries, x, x, need_weights=False)[0]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
