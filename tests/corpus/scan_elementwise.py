"""`scan` of an elementwise recurrence that starts at a learned state, which is returned at the end."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.initial = nn.Parameter(torch.randn(width))

    def forward(self, x):
        def step(h, now):
            z, value = now
            z = torch.sigmoid(z)
            h = (1 - z) * h + z * value
            return h, h.clone()

        h, hs = scan(step, self.initial.repeat(x.shape[0], 1), (self.gate(x), self.value(x)), dim=1)
        return hs, h


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
