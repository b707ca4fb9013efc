"""A loss and a mean of the states that the steps add up, and the sum of all k v^T, which nothing decays."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"] * 3 + ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (5,), (3, 8)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.gate, self.inputs, self.head = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, y):
        h, mean, loss = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), 0
        S = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
        for t in range(x.shape[1]):
            z = torch.sigmoid(self.gate(x[:, t]))
            h = z * h + (1 - z) * self.inputs(x[:, t])
            mean += h
            loss = loss + F.mse_loss(self.head(h), y[:, t]) + 0.1 * h.pow(2).mean()
            S = S + torch.einsum("bi,bj->bij", x[:, t], y[:, t])
        return loss / x.shape[1], mean / x.shape[1], S


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype), torch.randn(batch, length, 6, dtype=dtype)
