"""nanoGPT's causal mask in a buffer, cut to [:T, :T], around linear attention with a feature map."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class CausalLinearAttention(nn.Module):
    def __init__(self, n_embd=12, n_head=3, block_size=64):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head = n_head
        self.register_buffer(
            "bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = F.relu(q) @ F.relu(k).transpose(-2, -1)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, 0.0)
        y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


def make_model():
    return CausalLinearAttention()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 12, dtype=dtype)
