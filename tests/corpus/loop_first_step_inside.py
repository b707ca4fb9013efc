"""The first step of a loop is written apart, since there is no state yet: what a state of zeros would give."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, a):
        state, out = None, []
        for t in range(q.shape[1]):
            written = k[:, t, :, None] * v[:, t, None]
            state = written if t == 0 else a[:, t, :, None] * state + written
            out.append((q[:, t, :, None] * state).sum(1))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v, a = (torch.randn(batch, length, 3, dtype=dtype) for _ in range(4))
    return q, k, v, torch.sigmoid(a + 2)
