"""The same with the sequence padded to whole chunks, and the padding cut off; slices and sequence pad differently."""

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = {"families": ["per head and token"]}
LOCAL_LENGTHS = ()  # half a minute; tests/models has it as Mamba-2 writes it
MORE_LOCAL_LENGTHS = (6, 3, 5)


def chunks(x, pad, size):
    x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, pad))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def segment_sum(x):
    size = x.size(-1)
    x = x[..., None].expand(*x.size(), size)
    mask = torch.tril(torch.ones(size, size, dtype=torch.bool, device=x.device), diagonal=-1)
    x = torch.cumsum(x.masked_fill(~mask, 0), dim=-2)
    mask = torch.tril(torch.ones(size, size, dtype=torch.bool, device=x.device), diagonal=0)
    return x.masked_fill(~mask, -torch.inf)


def scan(x, a, b, c, size):
    batch, length, heads, width = x.shape
    pad = (size - length % size) % size
    x, a, b, c = (chunks(each, pad, size) for each in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    total = a.cumsum(-1)
    inside = torch.exp(segment_sum(a))
    scores = (c[:, :, :, None] * b[:, :, None]).sum(-1)
    y = ((scores * inside.permute(0, 2, 3, 4, 1))[..., None] * x[:, :, None]).sum(3)
    left = torch.exp(total[..., -1:] - total).permute(0, 2, 3, 1)
    states = ((b * left[..., None])[..., None, :] * x[..., None]).sum(2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segment_sum(F.pad(total[..., -1], (1, 0)))).transpose(1, 3)
    states = (between[..., None, None] * states[:, :, None]).sum(1)[:, :-1]
    y = y + torch.einsum("bclhn,bchpn->bclhp", c, states) * torch.exp(total).permute(0, 2, 3, 1)[..., None]
    y = y.reshape(batch, -1, heads, width)
    return y[:, :length] if pad > 0 else y


class Model(nn.Module):
    def forward(self, x, a, b, c):
        return scan(x, a, b, c, 4)


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    x = torch.randn(batch, length, 2, 3, dtype=dtype)
    b, c = (torch.randn(batch, length, 2, 5, dtype=dtype) for _ in range(2))
    return x, -0.3 * torch.rand(batch, length, 2, dtype=dtype), b, c
