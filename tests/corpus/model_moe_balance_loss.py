"""A router's load-balancing loss: mean probability times the share of tokens, per expert; top-1 routing."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class MoE(nn.Module):
    def __init__(self, width=6, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / 3)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.max(-1)
        one_hot = F.one_hot(chosen, probs.shape[-1]).to(x.dtype)
        y = torch.einsum("btd,edf,bte->btf", x, self.experts, one_hot) * weight[..., None]
        balance = (probs.mean((0, 1)) * one_hot.mean((0, 1))).sum() * probs.shape[-1]
        return y, balance


def make_model():
    return MoE()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
