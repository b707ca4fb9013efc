"""minGRU ("Were RNNs all we needed?"), step by step with lerp."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class MinGRU(nn.Module):
    def __init__(self, width=6, hidden=5):
        super().__init__()
        self.z, self.h = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x):
        z = torch.sigmoid(self.z(x) - 1)
        candidate = self.h(x)
        h = x.new_zeros(x.size(0), candidate.size(-1))
        states = []
        for z_t, c_t in zip(z.unbind(1), candidate.unbind(1), strict=True):
            h = torch.lerp(h, c_t, z_t)
            states.append(h)
        return self.out(torch.stack(states, 1))


def make_model():
    return MinGRU()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
