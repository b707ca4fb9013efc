"""A mixture of experts that sorts its tokens by expert, works on them in that order, and puts them back."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class MoE(nn.Module):
    def __init__(self, width=6, experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / 3)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        y = torch.bmm(tokens[order].unsqueeze(1), self.experts[expert]).squeeze(1)
        y = F.gelu(y) * weight[order].unsqueeze(-1)
        out = torch.zeros_like(tokens)
        out[order] = y
        return x + out.view_as(x)


def make_model():
    return MoE()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
