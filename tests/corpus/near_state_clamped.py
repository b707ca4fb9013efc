"""The state is clipped at every step."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_state_clamped\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (3,)


class Model(nn.Module):
    def forward(self, a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = (a[:, t] * h + b[:, t]).clamp(-50, 50)
            out.append(h)
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return 1 - 0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(
        batch, length, 4, dtype=dtype
    ) * 40
