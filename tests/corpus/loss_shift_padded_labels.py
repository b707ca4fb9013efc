"""Hugging Face's ForCausalLMLoss: labels padded with -100 and cut, float32 logits, mean or sum by count."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class LM(nn.Module):
    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.vocabulary = vocabulary
        self.embed, self.qkv = nn.Embedding(vocabulary, width), nn.Linear(width, 3 * width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.lm_head(x + torch.tril(q @ k.mT) @ v)
        labels = F.pad(labels, (0, 1), value=-100)
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(
            logits.view(-1, self.vocabulary), shift_labels.view(-1), ignore_index=-100, reduction="mean"
        )


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    ids = torch.randint(11, (batch, length))
    labels = ids.clone()
    labels[0, 1:-2] = -100
    return (ids,), {"labels": labels}
