"""Loops whose steps take something of their own token beside the state: a bonus (RWKV-5) over a learned decay, an own
write that does not decay, a skip connection."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel", "constant per head", "per head and token"]}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bonus, self.decay, self.skip = (nn.Parameter(torch.randn(4, 1)) for _ in range(3))
        self.mix = nn.Linear(4, 4)

    def rwkv5(self, q, k, v):
        out, decay = [], torch.exp(-torch.exp(self.decay))
        state = q.new_zeros(q.shape[0], 4, 4)
        for t in range(q.shape[1]):
            write = k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, None, :] @ (state + self.bonus * write)).squeeze(1))
            state = decay * state + write
        return torch.stack(out, 1)

    def decays_behind(self, q, k, v):
        out, state = [], torch.zeros_like(k[:, 0, :, None] * v[:, 0, None, :])
        for t in range(q.shape[1]):
            write = k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, None, :] @ (state + write)).squeeze(1))
            state = 0.9 * state + write
        return torch.stack(out, 1)

    def skips(self, q, k, v, g):
        out, state = [], torch.zeros_like(k[:, 0, :, None] * v[:, 0, None, :])
        for t in range(q.shape[1]):
            state = g[:, t, None, None] * state + k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, None, :] @ state).squeeze(1) + self.skip.squeeze(1) * v[:, t])
        return torch.stack(out, 1)

    def forward(self, q, k, v, g):
        v = self.mix(self.rwkv5(q, k, v))
        return self.skips(q, k, self.mix(self.decays_behind(q, k, v)), g)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, 0.4 + 0.5 * torch.rand(batch, length, dtype=dtype)
