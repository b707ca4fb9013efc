"""What it returns for the next call is the transposed state, with the last token's write once more."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_final_state_transposed\.py", "or_equal": True}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, g):
        S = torch.zeros(q.shape[0], 4, 4, dtype=q.dtype)
        out = []
        for t in range(q.shape[1]):
            write = k[:, t].unsqueeze(2) * v[:, t].unsqueeze(1)
            S = torch.exp(g[:, t])[:, None, None] * S + write
            out.append((q[:, t].unsqueeze(1) @ S)[:, 0])
        return torch.stack(out, 1), S.mT.contiguous() + write


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, dtype=dtype)
