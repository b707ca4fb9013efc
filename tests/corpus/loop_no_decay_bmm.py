"""No gate: a fast-weight memory that adds bmm outer products, read out with the query of each step."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


class FastWeights(nn.Module):
    def __init__(self, width=7, key=4, value=5):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, key), nn.Linear(width, key), nn.Linear(width, value)

    def forward(self, x):
        memory = None
        outputs = []
        for step in x.unbind(1):
            q, k, v = self.q(step), self.k(step), self.v(step)
            write = torch.bmm(v.unsqueeze(2), k.unsqueeze(1))
            memory = write if memory is None else memory + write
            outputs.append(torch.bmm(memory, q.unsqueeze(2)).squeeze(2))
        return torch.stack(outputs, 1)


def make_model():
    return FastWeights()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 7, dtype=dtype)
