"""Extractive question answering: a softmax over all positions for where the answer starts and one for where it ends.

Labels beyond the sequence do not count, as Hugging Face has it.
"""

import torch
import torch.nn.functional as F
from torch import nn

import zeco_compile

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (2, 5)
MORE_LOCAL_LENGTHS = (4,)


class Reader(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.qkv, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, 2)

    def forward(self, x, starts, ends):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = torch.tril(q @ k.mT) @ v
        start, end = (logits.squeeze(-1) for logits in self.outputs(y).split(1, dim=-1))
        beyond = start.size(1)
        losses = [
            F.cross_entropy(logits, labels.clamp(0, beyond), ignore_index=beyond)
            for logits, labels in ((start, starts), (end, ends))
        ]
        return sum(losses) / 2, start, end


def make_model():
    return Reader()


def make_inputs(batch, length, dtype):
    x = torch.randn(batch, length, 6, dtype=dtype)
    starts, ends = torch.arange(batch), length - 2 + 3 * torch.arange(batch)
    return x, zeco_compile.mark_sequence(starts, None), zeco_compile.mark_sequence(ends, None)
