"""fairseq's layout: [T, B, C] inside, batch and heads merged for bmm, a mask of ones."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)
MORE_LOCAL_LENGTHS = (2,)


class Model(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        x = x.transpose(0, 1)
        tgt_len, bsz, width = x.size()
        q = self.q_proj(x) * self.head_dim**-0.5
        k, v = self.k_proj(x), self.v_proj(x)
        q = q.contiguous().view(tgt_len, bsz * self.heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.heads, self.head_dim).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2))
        weights = weights * torch.ones_like(weights[0]).tril().unsqueeze(0)
        attn = torch.bmm(weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, width)
        return attn.transpose(0, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
