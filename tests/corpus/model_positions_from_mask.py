"""Position ids as the cumulative sum of an attention mask, minus one, as Hugging Face's generation does."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(32, 4)

    def forward(self, x, mask):
        position_ids = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        seen = (mask == 0).cumsum(1, dtype=torch.int32)
        return x + self.wpe(position_ids) * seen[..., None], seen


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :2] = 0
    return torch.randn(batch, length, 4, dtype=dtype), mask
