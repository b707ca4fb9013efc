"""Labels rolled by one, the last of them ignored; each token's loss, weighted."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        logits = self.head(self.embed(tokens))
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        loss = F.cross_entropy(logits.view(-1, 7), labels.view(-1), ignore_index=-100)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
            tokens.shape[0], -1
        )
        weights = torch.arange(tokens.shape[1], dtype=each.dtype)
        return loss + (each * weights).sum() / weights.sum()


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randint(0, 7, (batch, length))
