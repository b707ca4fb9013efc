"""A classifier: mean over all tokens after linear attention."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Classifier(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, classes)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head((torch.tril(q @ k.mT) @ v).mean(dim=1))


def make_model():
    return Classifier()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
