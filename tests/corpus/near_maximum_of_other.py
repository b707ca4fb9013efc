"""The maximum is updated from the other state's."""

import torch
from torch import nn
from torch.nn.functional import logsigmoid

EXPECTED = {"refused": r"near_maximum_of_other\.py"}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, z, i, f):
        c = n = m = torch.zeros_like(z[:, 0])
        out = []
        for t in range(z.shape[1]):
            log_f = logsigmoid(f[:, t])
            new = torch.maximum(log_f + n, i[:, t])
            f_, i_ = torch.exp(log_f + m - new), torch.exp(i[:, t] - new)
            c, n, m = f_ * c + i_ * z[:, t], f_ * n + i_, new
            out.append(c / (n + torch.exp(-m)))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return tuple(2 * torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
