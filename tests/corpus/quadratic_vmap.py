"""Written for one sequence and one head, with a decay for each: `torch.vmap` over both."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(2))

    def forward(self, q, k, v):
        def head(q, k, v, decay):
            at = torch.arange(q.shape[0])
            apart = at[:, None] - at[None]
            return (q @ k.T * torch.where(apart >= 0, torch.sigmoid(decay) ** apart.clamp(min=0), 0.0)) @ v

        return torch.vmap(torch.vmap(head, (1, 1, 1, 0), 1), (0, 0, 0, None))(q, k, v, self.decay)


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 2, 4, dtype=dtype) for _ in range(3))
