"""DeltaNet: the state is corrected by what it already returns for k; its transition is a matrix."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"refused": r"(?s)near_delta_rule\.py.*as a delta rule does"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, q, k, v, beta):
        k = F.normalize(k, dim=-1)
        S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        out = []
        for t in range(q.shape[1]):
            old = torch.einsum("bk,bkv->bv", k[:, t], S)
            S = S + k[:, t, :, None] * (beta[:, t, None] * (v[:, t] - old))[:, None, :]
            out.append(torch.einsum("bk,bkv->bv", q[:, t], S))
        return torch.stack(out, 1)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, torch.rand(batch, length, dtype=dtype)
