"""The popular one-file RetNet: one module per head, gamma a Python float, D = gamma ** (n - m) if n >= m."""

import math

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "constant per head"]}
LOCAL_LENGTHS = (5,)


class SimpleRetention(nn.Module):
    def __init__(self, width, gamma, head_size):
        super().__init__()
        self.gamma = gamma
        self.W_Q = nn.Parameter(torch.randn(width, head_size) / width)
        self.W_K = nn.Parameter(torch.randn(width, head_size) / width)
        self.W_V = nn.Parameter(torch.randn(width, head_size) / width)

    def _get_D(self, sequence_length, like):
        n = torch.arange(sequence_length, device=like.device, dtype=like.dtype).unsqueeze(1)
        m = torch.arange(sequence_length, device=like.device, dtype=like.dtype).unsqueeze(0)
        return (self.gamma ** (n - m)) * (n >= m).to(like.dtype)

    def forward(self, X):
        D = self._get_D(X.shape[1], X)
        Q, K, V = X @ self.W_Q, X @ self.W_K, X @ self.W_V
        ret = (Q @ K.permute(0, 2, 1)) * D.unsqueeze(0)
        return ret @ V


class MultiScale(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        gammas = (1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), heads))).tolist()
        self.retentions = nn.ModuleList(SimpleRetention(width, gamma, 4) for gamma in gammas)

    def forward(self, X):
        return torch.cat([retention(X) for retention in self.retentions], dim=2)


def make_model():
    return MultiScale()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
