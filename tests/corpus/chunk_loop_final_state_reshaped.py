"""The state after the last chunk, transposed and as one row of numbers, from a state that is learned; taken before the
output is put together."""

import torch
from torch import nn

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS = (4,)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, q, k, v, g):
        C = 2
        causal = torch.tril(torch.ones(C, C, dtype=torch.bool))
        S = self.first.expand(q.shape[0], -1, -1)
        out = []
        for c in range(0, q.shape[1], C):
            qc, kc, vc, G = q[:, c : c + C], k[:, c : c + C], v[:, c : c + C], g[:, c : c + C].cumsum(1)
            scores = ((qc * G.exp()) @ (kc * (-G).exp()).mT).masked_fill(~causal, 0.0)
            out.append(scores @ vc + (qc * G.exp()) @ S)
            write = (kc * (G[:, -1:] - G).exp()).mT @ vc
            S = G[:, -1].exp().unsqueeze(-1) * S + write
        flat = S.mT.flatten(1)
        return torch.cat(out, 1), flat


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    q, k, v = (torch.randn(batch, length, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -0.2 * torch.rand(batch, length, 4, dtype=dtype)
