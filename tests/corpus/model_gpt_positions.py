"""GPT-2's position table, looked up with arange(T), above a linear-attention layer."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, vocabulary=13, width=8, longest=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.attn = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx):
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        q, k, v = self.attn(x).chunk(3, -1)
        x = x + torch.tril(q @ k.transpose(1, 2)) @ v
        return self.head(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randint(13, (batch, length))
