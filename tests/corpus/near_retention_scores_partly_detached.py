"""As RetNet's last normalisation, but half of the sum of the row takes part in the gradient."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_retention_scores_partly_detached\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        index = torch.arange(q.shape[1], device=q.device)
        decays = (0.9 ** (index[:, None] - index).to(q.dtype)).tril()
        scores = q @ k.mT * decays
        total = (scores.detach() + scores).sum(dim=-1, keepdim=True) / 2
        return scores @ v / total.abs().clamp(min=1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
