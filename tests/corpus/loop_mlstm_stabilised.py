"""xLSTM's mLSTM step by step with its stabiliser, from states of an earlier segment, which are returned, too."""

import torch
from torch import nn

import zeco_compile

EXPECTED = {"families": ["per head and token", "per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, i, f, C, n, m):
        out = []
        for t in range(q.shape[1]):
            log_f = torch.nn.functional.logsigmoid(f[:, t])
            new = torch.max(log_f + m, i[:, t])
            f_, i_ = torch.exp(log_f + m - new), torch.exp(i[:, t] - new)
            C = f_[..., None] * C + i_[..., None] * (k[:, t, :, :, None] @ v[:, t, :, None, :])
            n = f_ * n + i_ * k[:, t]
            read = (q[:, t, :, None, :] @ C).squeeze(-2)
            normaliser = (q[:, t] * n).sum(-1, keepdim=True).abs()
            out.append(read / (torch.maximum(normaliser, torch.exp(-new)) + 1e-3))
            m = new
        return torch.stack(out, 1), C, n, m


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(3))
    i, f = (2 * torch.randn(batch, length, 3, 1, dtype=dtype) for _ in range(2))
    states = [torch.randn(batch, 3, *sizes, dtype=dtype) for sizes in ((4, 4), (4,), (1,))]
    return q, k, v, i, f, *(zeco_compile.mark_sequence(state, None) for state in states)
