"""Complex decays of the token, some zero and some beyond one, from a learned state to a final one; three ranks."""

import torch
from torch import nn

EXPECTED = {"families": ["complex"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (4,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self, width=4, state=3):
        super().__init__()
        self.size = nn.Linear(width, state)
        self.angle = nn.Linear(width, state)
        self.parts = nn.Linear(width, 2 * state)
        self.initial = nn.Parameter(torch.randn(state, dtype=torch.cfloat))

    def forward(self, x):
        decay = torch.polar(torch.relu(self.size(x) + 0.6), self.angle(x))
        write = torch.view_as_complex(self.parts(x).unflatten(-1, (-1, 2)))
        h = self.initial.expand(x.shape[0], -1)
        hs = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + write[:, t]
            hs.append(h)
        return torch.stack(hs, 1).abs(), torch.view_as_real(h)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
