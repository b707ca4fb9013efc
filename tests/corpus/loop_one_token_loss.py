"""A step loop under a next-token loss; the state is read without a query."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class Model(nn.Module):
    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, labels):
        x = self.emb(ids)
        a, b = torch.sigmoid(self.gate(x) + 1), self.value(x)
        h = torch.zeros_like(b[:, 0])
        states = []
        for t in range(ids.shape[1]):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        logits = self.head(torch.stack(states, 1))
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    ids = torch.randint(11, (batch, length))
    return ids, ids
