"""Lightning attention (TNL, MiniMax): slopes in a buffer, log decay where i >= j, else -inf."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["constant per head"]}
LOCAL_LENGTHS = (3,)


def slopes(heads):
    return torch.tensor([2 ** (-(i + 1) * 8 / heads) for i in range(heads)]).reshape(heads, 1, 1)


class Lightning(nn.Module):
    def __init__(self, heads=3, dim=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(12, 3 * heads * dim)
        self.register_buffer("slope_rate", slopes(heads))
        self.out = nn.Linear(heads * dim, 12)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = F.silu(self.qkv(x)).view(b, n, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        array = torch.arange(n, device=x.device)
        index = array[:, None] - array[None, :]
        s_index = self.slope_rate * index
        s_index = torch.where(index >= 0, -s_index, float("-inf"))
        diag_decay = torch.exp(s_index)
        qk = torch.matmul(q, k.transpose(-1, -2)) * diag_decay
        return self.out(torch.matmul(qk, v).transpose(1, 2).flatten(2))


def make_model():
    return Lightning()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 12, dtype=dtype)
