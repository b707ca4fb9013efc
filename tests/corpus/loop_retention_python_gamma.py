"""The recurrent form of the one-file RetNet: a Python float decays the state of one head."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class SimpleRetention(nn.Module):
    def __init__(self, width=6, gamma=0.96875, head=4):
        super().__init__()
        self.gamma = gamma
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(width, head) / width) for _ in range(3))

    def forward_recurrent(self, x_n, s_n_1):
        Q, K, V = x_n @ self.W_Q, x_n @ self.W_K, x_n @ self.W_V
        s_n = self.gamma * s_n_1 + K.transpose(-1, -2) @ V
        return Q @ s_n, s_n

    def forward(self, X):
        s = torch.zeros(X.shape[0], 4, 4, dtype=X.dtype, device=X.device)
        outs = []
        for i in range(X.shape[1]):
            y, s = self.forward_recurrent(X[:, i : i + 1], s)
            outs.append(y)
        return torch.cat(outs, 1)


def make_model():
    return SimpleRetention()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
