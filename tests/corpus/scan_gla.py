"""`scan` of torch._higher_order_ops over the sequence: decay, outer product and read-out in its body."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)
MORE_LOCAL_LENGTHS = (1, 2)


class GLA(nn.Module):
    def __init__(self, width=8, heads=2, key=3, value=4):
        super().__init__()
        self.heads, self.key, self.value = heads, key, value
        self.q, self.k, self.g = (nn.Linear(width, heads * key) for _ in range(3))
        self.v = nn.Linear(width, heads * value)

    def forward(self, x):
        q, k, g = (f(x).unflatten(-1, (self.heads, self.key)) for f in (self.q, self.k, self.g))
        v = self.v(x).unflatten(-1, (self.heads, self.value))
        g = nn.functional.logsigmoid(g) / 16

        def step(state, now):
            q, k, v, g = now
            state = state * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
            return state.clone(), (q.unsqueeze(-1) * state).sum(-2)

        initial = x.new_zeros(x.shape[0], self.heads, self.key, self.value)
        _, o = scan(step, initial, (q, k, v, g), dim=1)
        return o.flatten(2)


def make_model():
    return GLA()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
