"""torch.addcmul for the outer product, the gate given as a decay between 0 and 1."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, r, k, v, w):
        B, T, H, K = r.shape
        state = torch.zeros(B, H, K, v.size(-1), dtype=r.dtype)
        out = []
        for t in range(T):
            state = torch.addcmul(w[:, t].unsqueeze(-1) * state, k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-2))
            out.append(torch.sum(r[:, t].unsqueeze(-1) * state, dim=-2, keepdim=True))
        return torch.cat(out, dim=2).permute(0, 2, 1, 3)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, 5, dtype=dtype),
        1 - 0.2 * torch.rand(batch, length, 3, 4, dtype=dtype),
    )
