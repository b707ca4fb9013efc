"""Heads are columns that are cut out inside of the step, one loop for each."""

import torch
from torch import nn

EXPECTED = {"families": ["constant per head", "constant per head"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v):
        heads = []
        for h, gamma in enumerate([0.9, 0.8]):
            columns = slice(2 * h, 2 * h + 2)
            S, out = torch.zeros(q.shape[0], 2, 2, dtype=q.dtype), []
            for t in range(q.shape[1]):
                S = gamma * S + k[:, t : t + 1, columns].mT @ v[:, t : t + 1, columns]
                out.append(q[:, t : t + 1, columns] @ S)
            heads.append(torch.cat(out, 1))
        return torch.cat(heads, 2)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
