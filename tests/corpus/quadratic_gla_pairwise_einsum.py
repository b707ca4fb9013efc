"""A reference for tests, [B, T, H, K]: the decay of every pair, -inf where masked, one einsum."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)
WORLD_SIZE = 3


class Reference(nn.Module):
    def forward(self, q, k, v, g):
        T = q.shape[1]
        G = g.cumsum(1)
        decay = G[:, :, None] - G[:, None]
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        decay = decay.masked_fill(future[None, :, :, None, None], float("-inf")).exp()
        A = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, decay)
        return torch.einsum("bhij,bjhv->bihv", A, v)


def make_model():
    return Reference()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, 5, dtype=dtype),
        -0.2 * torch.rand(batch, length, 3, 4, dtype=dtype),
    )
