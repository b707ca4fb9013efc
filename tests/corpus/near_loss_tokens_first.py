"""Logits with the sequences one behind the other, and labels with the first tokens of all sequences first."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"near_loss_tokens_first\.py"}
LOCAL_LENGTHS = (4,)
MORE_LOCAL_LENGTHS = (2,)


class LM(nn.Module):
    def __init__(self, vocabulary=7, width=6):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.t().flatten())


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    return torch.randint(7, (batch, length))
