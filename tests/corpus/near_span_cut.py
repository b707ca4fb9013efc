"""Where an answer starts, which is never at the last token: the classes are some of the positions."""

import torch
import torch.nn.functional as F
from torch import nn

import zeco_compile

EXPECTED = {"refused": r"near_span_cut\.py"}
LOCAL_LENGTHS = (4,)


class Reader(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.output = nn.Linear(width, 1)

    def forward(self, x, starts):
        return F.cross_entropy(self.output(x)[:, :-1, 0], starts)


def make_model():
    return Reader()


def make_inputs(batch, length, dtype):
    x = torch.randn(batch, length, 6, dtype=dtype)
    return x, zeco_compile.mark_sequence(length - 2 - torch.arange(batch), None)
