"""Packed documents: causal, and within the same document."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_document_mask\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def forward(self, q, k, v, document):
        T = q.shape[1]
        same = document[:, :, None] == document[:, None, :]
        causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        return (q @ k.mT).masked_fill(~(same & causal), 0) @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, (torch.arange(length) // 3).expand(batch, length).clone()
