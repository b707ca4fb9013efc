"""One key for all heads, as in Mamba-2 with one group; values and gates have heads."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def forward(self, q, k, v, a):
        T = q.shape[1]
        log_a = torch.log(a)
        c = torch.cumsum(log_a, 1)
        mask = torch.arange(T, device=q.device)[:, None] < torch.arange(T, device=q.device)[None]
        L = (c[:, :, None] - c[:, None]).masked_fill(mask[..., None], -1e30).exp()
        return torch.einsum("btk,bsk,btsh,bshv->bthv", q, k, L, v)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, 5, dtype=dtype),
        1 - 0.3 * torch.rand(batch, length, 3, dtype=dtype),
    )
