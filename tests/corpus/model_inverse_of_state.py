"""Ridge regression over the whole sequence: the inverse of a sum over tokens, and a matrix of each token inverted."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        k, v, one = self.key(x), self.value(x), torch.eye(4, dtype=x.dtype)
        weights = torch.linalg.inv(one + k.mT @ k) @ (k.mT @ v)
        own = torch.linalg.inv(2 * one + k[..., :, None] * k[..., None, :])
        return x @ weights + (own @ v[..., None])[..., 0]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
