"""A two-layer language-model trunk: RMSNorm, Conv1d padded and cut (fla's ShortConvolution), GLA, SwiGLU."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per channel", "per channel"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (2,)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkvg = nn.Linear(width, 4 * width, bias=False)
        self.conv = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width, padding=3)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        T = x.shape[1]
        qkv, g = self.qkvg(self.norm1(x)).tensor_split([3 * x.shape[-1]], dim=-1)
        qkv = F.silu(self.conv(qkv.transpose(1, 2))[..., :T].transpose(1, 2))
        q, k, v, g = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (*qkv.chunk(3, -1), g))
        c = (F.logsigmoid(g) / 16).cumsum(2)
        scores = (q * c.exp()) @ (k * (-c).exp()).transpose(-1, -2)
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        x = x + (scores.masked_fill(~causal, 0) @ v).transpose(1, 2).flatten(2)
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Trunk(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))

    def forward(self, x):
        return self.blocks(x)


def make_model():
    return Trunk()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
