"""RetNet's full form: the decay matrix is divided by the square root of its rows' sums."""

import torch
from torch import nn

import zeco_compile

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-2 - torch.arange(heads))))

    def forward(self, q, k, v):
        index = torch.arange(q.shape[2], device=q.device)
        mask = ((index[:, None] - index[None, :]) * self.decay[:, None, None]).exp().tril()
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        return ((q @ k.mT) * mask) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (zeco_compile.mark_sequence(torch.randn(batch, 2, length, 3, dtype=dtype), 2) for _ in range(3))
    return q, k, v
