"""HGRN2: the forget gate is also the key, k = 1 - f, with a lower bound on f."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class HGRN2(nn.Module):
    def __init__(self, width=8, heads=2, expand=3):
        super().__init__()
        self.heads, self.expand = heads, expand
        self.q_proj, self.f_proj = (nn.Linear(width, heads * expand, bias=False) for _ in range(2))
        self.i_proj = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = F.silu(self.q_proj(x)).view(B, T, self.heads, -1)
        f = (0.7 + 0.3 * torch.sigmoid(self.f_proj(x))).view(B, T, self.heads, -1)
        k = 1 - f
        i = self.i_proj(x).view(B, T, self.heads, -1)
        S = torch.zeros(B, self.heads, self.expand, i.shape[-1], dtype=x.dtype, device=x.device)
        o = []
        for t in range(T):
            S = f[:, t].unsqueeze(-1) * S + torch.einsum("bhk,bhv->bhkv", k[:, t], i[:, t])
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return self.o_proj(self.norm(torch.stack(o, 1).flatten(2)))


def make_model():
    return HGRN2()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
