"""The state is rotated by a fixed angle at every step: the transition is a matrix, complex poles."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_key_transition\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        angle = torch.tensor(0.3, dtype=q.dtype)
        R = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)]).view(2, 2)
        S, out = k.new_zeros(k.shape[0], 2, v.shape[2]), []
        for t in range(k.shape[1]):
            S = R @ S + k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, :, None] * S).sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 2, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(batch, length, 4, dtype=dtype)
