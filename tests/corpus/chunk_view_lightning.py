"""Lightning attention over blocks: a constant decay for each head, the last block may be shorter."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS = (6,)
MORE_LOCAL_LENGTHS = (5,)
BLOCK = 4


class Lightning(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        slope = torch.tensor([0.7, 0.2], dtype=torch.float64)[:, None, None]
        at = torch.arange(BLOCK) + 1
        self.register_buffer("slope", slope)
        self.register_buffer("query_decay", torch.exp(-slope * at[:, None]))
        self.register_buffer("key_decay", torch.exp(-slope * (BLOCK - at[:, None])))
        distance = slope * (at[:, None] - at[None, :])
        self.register_buffer("diagonal", torch.exp(torch.where(distance >= 0, -distance, float("-inf"))))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for z in torch.nn.functional.silu(self.qkv(x)).chunk(3, -1)
        )
        state = torch.zeros(b, self.heads, d // self.heads, d // self.heads, dtype=x.dtype)
        out = []
        for i in range((t + BLOCK - 1) // BLOCK):
            start, end = i * BLOCK, min((i + 1) * BLOCK, t)
            size = end - start
            qi, ki, vi = q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]
            inside = (qi @ ki.transpose(-1, -2) * self.diagonal[:, :size, :size]) @ vi
            out.append(inside + (qi * self.query_decay[:, :size]) @ state)
            keys = ki * self.key_decay[:, -size:]
            state = state * torch.exp(-self.slope * size) + keys.transpose(-1, -2) @ vi
        return torch.cat(out, dim=-2).transpose(1, 2).reshape(b, t, d)


def make_model():
    return Lightning()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
