"""A mixture of experts of limited capacity: the tokens of an expert behind its first few are dropped."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_moe_capacity\.py"}
LOCAL_LENGTHS = (5,)


class MoE(nn.Module):
    def __init__(self, width=6, experts=3, capacity=4):
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts), capacity
        self.experts = nn.Parameter(torch.randn(experts, width, width) / 3)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        same = (expert[:, None] == expert) & torch.ones(len(expert), len(expert), dtype=torch.bool).tril()
        kept = same.sum(1) <= self.capacity
        y = torch.bmm(tokens[order].unsqueeze(1), self.experts[expert]).squeeze(1) * weight[order, None]
        out = torch.zeros_like(tokens)
        out[order] = y * kept[:, None]
        return x + out.view_as(x)


def make_model():
    return MoE()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
