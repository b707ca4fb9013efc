"""A mixture of experts that counts, token by token, how many came to its expert before it, without sorting."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_moe_place_in_expert\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class MoE(nn.Module):
    def __init__(self, width=6, experts=3, capacity=4):
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts), capacity
        self.experts = nn.Parameter(torch.randn(experts, width, width) / 3)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        chosen = F.one_hot(expert, self.router.out_features)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        y = torch.bmm(tokens.unsqueeze(1), self.experts[expert]).squeeze(1) * weight[:, None]
        return x + (y * (place <= self.capacity)[:, None]).view_as(x)


def make_model():
    return MoE()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
