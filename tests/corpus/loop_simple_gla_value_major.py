"""State stored as [B, H, V, K], updated in place with mul_ and add_; a decay per head and token."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, dt):
        B, T, H, K = q.shape
        S = q.new_zeros(B, H, v.shape[-1], K)
        y = []
        decay = torch.exp(-F.softplus(dt))
        for t in range(T):
            S.mul_(decay[:, t, :, None, None]).add_(v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2))
            y.append(torch.matmul(S.clone(), q[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(y, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 3, 5, dtype=dtype), torch.randn(batch, length, 3, dtype=dtype) - 2
