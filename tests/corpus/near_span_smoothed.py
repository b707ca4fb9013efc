"""Where an answer starts, with smoothed labels: each of the positions gets a part that is one over their number."""

import torch
import torch.nn.functional as F
from torch import nn

import zeco_compile

EXPECTED = {"refused": r"near_span_smoothed\.py"}
LOCAL_LENGTHS = (4,)


class Reader(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.output = nn.Linear(width, 1)

    def forward(self, x, starts):
        return F.cross_entropy(self.output(x)[..., 0], starts, label_smoothing=0.1)


def make_model():
    return Reader()


def make_inputs(batch, length, dtype):
    x = torch.randn(batch, length, 6, dtype=dtype)
    return x, zeco_compile.mark_sequence(length - 1 - torch.arange(batch), None)
