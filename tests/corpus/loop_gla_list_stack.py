"""A step loop with a list and a stack, [B, T, H, D], einsum for update and read-out."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (4,)


class GLA(nn.Module):
    def __init__(self, width=8, heads=2, key=3, value=4):
        super().__init__()
        self.heads, self.key, self.value = heads, key, value
        self.q, self.k, self.g = (nn.Linear(width, heads * key) for _ in range(3))
        self.v = nn.Linear(width, heads * value)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.heads, self.key)
        k = self.k(x).view(B, T, self.heads, self.key)
        v = self.v(x).view(B, T, self.heads, self.value)
        alpha = torch.sigmoid(self.g(x)).view(B, T, self.heads, self.key) ** (1 / 16)
        S = torch.zeros(B, self.heads, self.key, self.value, dtype=x.dtype, device=x.device)
        outs = []
        for t in range(T):
            S = torch.einsum("bhk,bhkv->bhkv", alpha[:, t], S) + torch.einsum(
                "bhk,bhv->bhkv", k[:, t], v[:, t]
            )
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(outs, dim=1).flatten(2)


def make_model():
    return GLA()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
