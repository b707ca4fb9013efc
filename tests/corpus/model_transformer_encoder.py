"""Layers of nn.TransformerEncoder with a causal mask, padding beside it."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, padding):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layers(x, mask, src_key_padding_mask=padding, is_causal=False)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -3:] = True
    return torch.randn(batch, length, 8, dtype=dtype), padding
