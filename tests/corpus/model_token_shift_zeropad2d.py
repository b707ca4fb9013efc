"""RWKV's token shift, nn.ZeroPad2d((0, 0, 1, -1)), in channel mixing around linear attention."""

import torch
from torch import nn

EXPECTED = {"families": ["none"]}
LOCAL_LENGTHS = (5, 1)


class ChannelMix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix_k, self.time_mix_r = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.key, self.receptance = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.value = nn.Linear(2 * width, width)

    def forward(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        return torch.sigmoid(self.receptance(xr)) * self.value(torch.square(torch.relu(self.key(xk))))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.mix1, self.mix2 = ChannelMix(width), ChannelMix(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        x = x + self.mix1(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.einsum("bij,bjv->biv", torch.einsum("bik,bjk->bij", q, k).tril(), v)
        return x + self.mix2(x)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 8, dtype=dtype)
