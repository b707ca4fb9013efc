"""Two layers over an embedding: features of elu, a running sum of outer products, and one of keys to divide by."""

import torch
from torch import nn
from torch.nn.functional import elu

EXPECTED = {"families": ["none"] * 4}
LOCAL_LENGTHS = (5,)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = elu(q) + 1, elu(k) + 1
        kv, z = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1), k.cumsum(1)
        return torch.einsum("btd,btde->bte", q, kv) / (torch.einsum("btd,btd->bt", q, z)[..., None] + 1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(19, 8), nn.ModuleList([Attention(), Attention()])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_model():
    return Model().double()


def make_inputs(batch, length, dtype):
    return torch.randint(0, 19, (batch, length))
