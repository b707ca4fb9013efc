"""Class weights and label smoothing in the next-token loss."""

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
        self.register_buffer("weight", 0.5 + torch.rand(vocabulary))

    def forward(self, tokens, labels):
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        logits = self.head(torch.tril(q @ k.mT) @ v)
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=self.weight, label_smoothing=0.1
        )


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    tokens = torch.randint(7, (batch, length))
    labels = tokens.clone()
    labels[:, ::3] = -100
    return tokens, labels
