"""Hugging Face's older causal loss: both shifted, contiguous, view(-1); labels ignored at many positions."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5,)
MORE_LOCAL_LENGTHS = (2,)


class LM(nn.Module):
    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.vocabulary = vocabulary
        self.embed, self.qkv = nn.Embedding(vocabulary, width), nn.Linear(width, 3 * width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.lm_head(x + torch.tril(q @ k.mT) @ v)
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss_fct = nn.CrossEntropyLoss()
        loss = loss_fct(shift_logits.view(-1, self.vocabulary), shift_labels.view(-1))
        return loss, logits


def make_model():
    return LM()


def make_inputs(batch, length, dtype):
    ids = torch.randint(11, (batch, length))
    labels = ids.clone()
    labels[:, : length - length // 4] = -100
    return ids, labels
