"""A loop fills a buffer, which is read under the name of a view that was made before, too."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_loop_buffer_view_read\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, a, b):
        out, h = torch.zeros_like(b), torch.zeros_like(b[:, 0])
        halves = out.view(*b.shape[:2], 2, 2)
        for t in range(b.shape[1]):
            h = a[:, t] * h + b[:, t]
            out[:, t] = h
        return halves.flatten(2) + out


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
