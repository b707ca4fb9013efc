"""An average that begins with the second token, and has the first one as it is."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_first_two_tokens\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (5,), (3,)


class Model(nn.Module):
    def forward(self, x):
        h = x[:, 1]
        outputs = [x[:, 0], h]
        for t in range(2, x.shape[1]):
            h = 0.7 * h + 0.3 * x[:, t]
            outputs.append(h)
        return torch.stack(outputs, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
