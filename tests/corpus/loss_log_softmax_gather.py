"""A loss by hand: log_softmax, gather of the shifted labels, negative mean."""

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

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.head(x + torch.tril(q @ k.mT) @ v)
        logp = F.log_softmax(logits[:, :-1], dim=-1)
        return -logp.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2).mean()


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    return torch.randint(7, (batch, length))
