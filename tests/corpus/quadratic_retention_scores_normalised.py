"""RetNet's last normalisation: scores divided by the sum of their row, which takes no part in the gradient."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        index = torch.arange(q.shape[1], device=q.device)
        decays = (0.9 ** (index[:, None] - index).to(q.dtype)).tril()
        scores = q @ k.mT * decays
        scores = scores / scores.detach().sum(dim=-1, keepdim=True).abs().clamp(min=1)
        return scores @ v


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 3, dtype=dtype) for _ in range(3))
