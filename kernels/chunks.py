"""Between tokens and chunks: the layout in which the chunked kernels compute, and sums along a sequence.

A chunk is a row: [B, T, H, D] becomes [rows, C, D] with row = (chunk * B + batch) * H + head, so that all
heads of one chunk lie together and a scan over chunks reads contiguous memory. The last chunk is filled up
with zeros: a token with k = 0 and log gate 0 leaves the state as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zeco_compile.kernels.shapes import Sizes

# The chunk that was fastest on a CPU and on an H200 (B=1, T=16384, H=16, K=V=128).
MAX_CHUNK_ON_CPU = 32
MAX_CHUNK_ON_GPU = 128
# exp(-1e4) is 0 in float64 too, so a gate this small resets the state; and sums of such gates stay finite, so
# that -inf and -1e38 need no case of their own: nothing is ever computed as -inf - -inf or 0 * inf.
RESET = -1e4
_LOG2_E = 1.4426950408889634
# Elements of one [rows, C, D] tensor that the work inside chunks takes at a time: about what a CPU's cache
# likes, and on a GPU what keeps the temporaries (some twenty of them) to a few GB.
_SLICE_ON_CPU = 1 << 17
_SLICE_ON_GPU = 1 << 25


# One of sum_to, sum_before, sum_from, sum_after: (x, dim) -> x's running sums along dim.
RunningSum = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Chunking:
    """How ``tokens`` tokens of ``batch`` sequences and ``heads`` heads are cut into ``count`` chunks."""

    batch: int
    tokens: int
    heads: int
    chunk: int
    count: int

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> Chunking:
        """Chunks of a power of two tokens, no longer than the sequence needs."""
        longest = MAX_CHUNK_ON_CPU if device.type == "cpu" else MAX_CHUNK_ON_GPU
        chunk = min(longest, 1 << (sizes.tokens - 1).bit_length())
        return cls(sizes.batch, sizes.tokens, sizes.heads, chunk, -(-sizes.tokens // chunk))

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] of any strides -> fresh contiguous [rows, C, D] in ``dtype``, zeros past the end."""
        channels = x.shape[3]
        out = torch.empty(
            (self.count, self.batch, self.heads, self.chunk, channels), dtype=dtype, device=x.device
        )
        whole, rest = divmod(self.tokens, self.chunk)
        full = x[:, : whole * self.chunk].unflatten(1, (whole, self.chunk))
        out[:whole].copy_(full.permute(1, 0, 3, 2, 4))
        if rest:
            out[whole, :, :, :rest].copy_(x[:, whole * self.chunk :].transpose(1, 2))
            out[whole, :, :, rest:].zero_()
        return out.view(-1, self.chunk, channels)

    def join(self, x: Tensor) -> Tensor:
        """[rows, C, D] -> fresh contiguous [B, T, H, D]; what ``split`` filled up is dropped."""
        channels = x.shape[2]
        x = x.view(self.count, self.batch, self.heads, self.chunk, channels)
        out = x.new_empty((self.batch, self.tokens, self.heads, channels))
        whole, rest = divmod(self.tokens, self.chunk)
        full = out[:, : whole * self.chunk].unflatten(1, (whole, self.chunk))
        full.copy_(x[:whole].permute(1, 0, 3, 2, 4))
        if rest:
            out[:, whole * self.chunk :].copy_(x[whole, :, :, :rest].transpose(1, 2))
        return out

    def slices(self, channels: int, device: torch.device) -> Iterator[slice]:
        """Slices of the rows, so many at a time that [rows, C, channels] stays small."""
        rows = self.count * self.batch * self.heads
        budget = _SLICE_ON_CPU if device.type == "cpu" else _SLICE_ON_GPU
        step = max(1, budget // (self.chunk * channels))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def running_sum(self, x: Tensor, kind: RunningSum) -> Tensor:
        """``kind`` over the whole sequence, for x [B, T, H, D]; fresh and contiguous.

        In two steps, inside chunks and over chunks: torch.cumsum goes through a long sequence one token after
        the other on a GPU, strides far through memory on a CPU, and its rounding error grows with the length.
        """
        rows = self.split(x, x.dtype)
        totals = rows.sum(1, keepdim=True).unflatten(0, (self.count, -1))
        over_chunks = sum_before if kind in (sum_to, sum_before) else sum_after
        inside = kind(rows, 1).unflatten(0, (self.count, -1)) + over_chunks(totals, 0)
        return self.join(inside.flatten(0, 1))

    def scan(self, added: Tensor, decay: Tensor | None, *, reverse: bool = False) -> Tensor:
        """The exclusive scan over chunks: what has arrived before each chunk (``reverse``: from after it).

        Args:
            added: [rows, K, V], what each chunk adds.
            decay: [rows, K or 1, 1], what each chunk multiplies by; None is 1.
            reverse: from the last chunk to the first.

        Returns:
            [rows, K, V]: arrived = decay * arrived + added, taken before the chunk's own step.
        """
        shape = (self.count, self.batch * self.heads)
        steps = added.view(*shape, *added.shape[1:])
        factors = None if decay is None else decay.view(*shape, *decay.shape[1:])
        arrived = torch.empty_like(steps)
        order = range(self.count - 1, -1, -1) if reverse else range(self.count)
        arrived[order[0]].zero_()
        for here, following in pairwise(order):
            if factors is None:
                torch.add(steps[here], arrived[here], out=arrived[following])
            else:
                torch.addcmul(steps[here], factors[here], arrived[here], out=arrived[following])
        return arrived.view(added.shape)


def finite_log_gate(g: Tensor, dtype: torch.dtype) -> Tensor:
    """g as [B, T, H, K or 1] in ``dtype``, hard resets brought to a finite number whose exponential is 0."""
    return (g if g.dim() == 4 else g.unsqueeze(-1)).to(dtype).clamp(min=RESET)


def decay_of(log_decay: Tensor) -> Tensor:
    """exp, fresh. By way of exp2, since torch.exp on a CPU is 10 to 40 times slower where it underflows,
    which is most of a sum over a long sequence; the exponent's extra rounding costs less than the last bit.
    """
    return (log_decay * _LOG2_E).exp2_()


def sum_to(x: Tensor, dim: int) -> Tensor:
    """out_t = the sum of x_s over s <= t."""
    return x.cumsum(dim)


def sum_before(x: Tensor, dim: int) -> Tensor:
    """out_t = the sum of x_s over s < t, never as a difference of longer sums."""
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    size = x.shape[dim]
    torch.cumsum(x.narrow(dim, 0, size - 1), dim, out=out.narrow(dim, 1, size - 1))
    return out


def sum_from(x: Tensor, dim: int) -> Tensor:
    """out_t = the sum of x_s over s >= t."""
    return x.flip(dim).cumsum(dim).flip(dim)


def sum_after(x: Tensor, dim: int) -> Tensor:
    """out_t = the sum of x_s over s > t, never as a difference of longer sums."""
    return sum_before(x.flip(dim), dim).flip(dim)
