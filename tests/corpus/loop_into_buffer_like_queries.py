"""The outputs are added into zeros made like the queries, whose features are those of the keys."""

import torch
from torch import nn
from torch.nn import functional as F

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        q, k, v, g = self.query(x), self.key(x), self.value(x), F.logsigmoid(x[..., 0])
        state, out = q.new_zeros(x.shape[0], 5, 5), torch.zeros_like(q)
        for t in range(x.shape[1]):
            state = g[:, t].exp()[:, None, None] * state + k[:, t, :, None] * v[:, t, None, :]
            out[:, t] += torch.einsum("bk,bkv->bv", q[:, t], state)
        return out


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 5, dtype=dtype)
