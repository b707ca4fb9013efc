"""A linear recurrence scanned from the last token to the first."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def forward(self, x, a):
        a = torch.sigmoid(a)

        def step(h, now):
            x, a = now
            h = a * h + x
            return h.clone(), h

        return scan(step, torch.zeros_like(x[:, 0]), (x, a), dim=1, reverse=True)[1]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
