"""RWKV's norm behind its loop: a group of features for each head, over rows of batch and tokens folded into one."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, heads=2, width=3):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(heads, heads * width)
        self.inner = nn.Linear(heads * width, 4 * heads * width)

    def forward(self, x):
        B, T, C = x.shape
        r, k, v, w = (part.view(B, T, self.heads, -1) for part in self.inner(x).chunk(4, -1))
        state = x.new_zeros(B, self.heads, r.shape[-1], v.shape[-1])
        out = []
        for t in range(T):
            state = state * (-w[:, t].exp()).exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None]
            out.append((r[:, t, :, None] @ state).squeeze(2))
        y = torch.stack(out, 1).reshape(B * T, C)
        return self.norm(y).view(B, T, C)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
