"""Returns the state after the last token too, for the next segment."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out = []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1), state


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    v = torch.randn(batch, length, 3, 6, dtype=dtype)
    return q, k, v, -0.2 * torch.rand(batch, length, 3, dtype=dtype)
