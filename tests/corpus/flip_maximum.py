"""A stabilised recurrence over the flipped sequence, its maximum too."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.key = nn.Linear(width, width)

    def forward(self, x):
        x = x.flip(1)
        key = self.key(x)
        largest = torch.full_like(key[:, 0], -1e38)
        top, bottom, out = torch.zeros_like(largest), torch.zeros_like(largest), []
        for t in range(x.shape[1]):
            forget = F.logsigmoid(x[:, t])
            now = torch.maximum(largest + forget, key[:, t])
            kept, new = torch.exp(forget + largest - now), torch.exp(key[:, t] - now)
            top, bottom, largest = kept * top + new * x[:, t], kept * bottom + new, now
            out.append(top / bottom.clamp(min=1e-9))
        return torch.stack(out, 1).flip(1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
