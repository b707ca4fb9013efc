"""BatchNorm in training over all tokens, folded into one axis, with running statistics; instance and group norm."""

import torch
from torch import nn

EXPECTED = {"families": []}
LOCAL_LENGTHS = (5,)
WORLD_SIZE = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.folded, self.channels = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=0.3)
        self.instance, self.group = nn.InstanceNorm1d(4, affine=True), nn.GroupNorm(2, 4)

    def forward(self, x):
        y = self.folded((x + 1000).flatten(0, 1)).view_as(x)
        return self.group(self.instance(self.channels(y.mT * x.mT)) + y.mT).mT


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
