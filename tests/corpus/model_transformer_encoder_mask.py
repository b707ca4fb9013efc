"""nn.TransformerEncoder with a causal mask, of which nothing is said."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layers(x, mask=mask)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
