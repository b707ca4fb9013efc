"""The input is padded to whole chunks, and all that follows is computed of the padding, too, until it is cut off."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {
    "refused": r"near_padded_at_the_top\.py.*pad q, k, v and the log decay .* and cut the result, \[:, :T\]"
}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % 4))
        q, k, v = self.qkv(x).unflatten(1, (-1, 4)).chunk(3, -1)
        states = k.mT @ v
        y = q @ (states.cumsum(1) - states) + (q @ k.mT).tril() @ v
        return (x + y.flatten(1, 2))[:, :length]


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
