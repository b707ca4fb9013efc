"""Position ids as the cumulative sum of an attention mask, minus one, as Hugging Face's generation does."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_positions_from_mask\.py", "or_equal": True}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(32, 4)

    def forward(self, x, mask):
        position_ids = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return x + self.wpe(position_ids)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :2] = 0
    return torch.randn(batch, length, 4, dtype=dtype), mask
