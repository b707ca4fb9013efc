"""A loss by hand: per-token losses, times a mask, over the number of ones in the mask."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class LM(nn.Module):
    def __init__(self, vocabulary=7, width=6):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocabulary, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, targets, mask):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.head(x + torch.tril(q @ k.mT) @ v)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
        return (losses * mask).sum() / mask.sum()


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    tokens, targets = torch.randint(7, (batch, length)), torch.randint(7, (batch, length))
    return tokens, targets, (torch.rand(batch, length, dtype=dtype) > 0.6).to(dtype)
