"""A cell with its projections inside, on slices of one token, that writes its projected output into a buffer."""

import torch
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)


class Model(nn.Module):
    def __init__(self, width=6, heads=3, head=2):
        super().__init__()
        self.heads, self.head = heads, head
        self.qkv = nn.Linear(width, 3 * heads * head)
        self.dt = nn.Linear(width, heads)
        self.A = nn.Parameter(torch.rand(heads))
        self.norm = nn.RMSNorm(head)
        self.out = nn.Linear(heads * head, width, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        out = torch.empty_like(x)
        state = x.new_zeros(B, self.heads, self.head, self.head)
        for t in range(T):
            token = x[:, t : t + 1]
            q, k, v = self.qkv(token).view(B, self.heads, 3, self.head).unbind(2)
            decay = torch.exp(-self.A.exp() * nn.functional.softplus(self.dt(token))).view(
                B, self.heads, 1, 1
            )
            state = decay * state + torch.matmul(k.unsqueeze(-1), v.unsqueeze(-2))
            o = self.norm(torch.matmul(q.unsqueeze(-2), state).squeeze(-2))
            out[:, t] = self.out(o.reshape(B, -1))
        return out


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 6, dtype=dtype)
