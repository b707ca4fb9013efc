"""What the Triton kernels share: tiles of a chunk, sums inside of it, and the exponents that gates make.

Gates are in units of log2, so that every decay is one ``exp2``. A tile is [chunk, channels]; a row past the end of
the sequence has k = v = q = 0 and log gate 0, which leaves a state as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A gate this small (in log2; -1e4 in natural units) resets: its exponential is 0, and sums of it stay finite.
RESET: tl.constexpr = tl.constexpr(-14426.950408889634)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def place(chunk, chunks, heads):
    """Of one chunk of all: its batch and head, in 64 bits, and its number in the sequence. Divisions in 32 bits take a
    fraction of the instructions."""
    chunk = tl.cast(chunk, tl.int32)
    bh = chunk // chunks
    return (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), chunk % chunks


@triton.jit
def chunk_rows(n, tokens, CHUNK: tl.constexpr):
    """Of chunk n: its first token, in 64 bits, and how many it has. Offsets inside of a chunk fit 32 bits."""
    first = tl.cast(n, tl.int64) * CHUNK
    return first, tl.minimum(tokens - first, CHUNK).to(tl.int32)


@triton.jit
def tile(base, t, row_stride, c, column_stride, tokens, channels: tl.constexpr):
    """[len(t), len(c)] from memory of any strides, 0 outside.

    Tiles begin at multiples of their width, so that a power of two of channels has no cut ones: without a mask over
    channels a kernel has a tenth fewer instructions.
    """
    at = base + t[:, None] * row_stride + c[None, :] * column_stride
    if c.shape[0] <= channels and channels & (channels - 1) == 0:
        return tl.load(at, mask=(t < tokens)[:, None], other=0.0)
    return tl.load(at, mask=(t < tokens)[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def store_tile(base, x, t, row_stride, c, column_stride, tokens, channels: tl.constexpr):
    at = base + t[:, None] * row_stride + c[None, :] * column_stride
    x = x.to(base.dtype.element_ty)
    if c.shape[0] <= channels and channels & (channels - 1) == 0:
        tl.store(at, x, mask=(t < tokens)[:, None])
    else:
        tl.store(at, x, mask=(t < tokens)[:, None] & (c < channels)[None, :])


@triton.jit
def log2_gate(g):
    """A loaded gate in log2 and float32, hard resets made finite. NaN stays NaN, which a maximum would drop."""
    x = g.to(tl.float32) * LOG2_E
    return tl.where(x < RESET, RESET, x)


@triton.jit
def gate_tile(base, t, row_stride, c, column_stride, tokens, channels: tl.constexpr):
    return log2_gate(tile(base, t, row_stride, c, column_stride, tokens, channels))


@triton.jit
def selected_sums(weights, x, DOT: tl.constexpr, PRECISION: tl.constexpr, added=None):
    """For each row of ``weights`` [rows, rows] (booleans, or numbers of a few bits), the sum of the rows of x
    [rows, columns] with these weights, and what is to be ``added``.

    As a product, which costs a fraction of a scan; what a sum leaves out is multiplied by 0 and costs it no precision.
    x is taken to 16 bits where everything else has 8, else to 22 or more.
    """
    if tl.bfloat16 == DOT:
        weights = weights.to(tl.bfloat16)
        # cut off, not rounded: what is left over is exact either way, and this is one instruction for two slow ones
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return tl.dot(weights, high.to(tl.bfloat16), tl.dot(weights, (x - high).to(tl.bfloat16), added))
    precision: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
    return tl.dot(weights.to(tl.float32), x, added, input_precision=precision)


@triton.jit
def chunk_factors(total, strong):
    """What a chunk's total (log2) makes of a state: on the way in to the chunk's operands and out again, and inside.

    With r the total's half, an ordinary channel keeps q exp2(G - r) and k exp2(r - G): the state enters and leaves
    through exp2(r). A strong one keeps q exp2(G) and k exp2(total - G): all of its decay is inside. Where a gate is one
    for all channels, the same of chunks.
    """
    return tl.exp2(tl.where(strong != 0, 0.0, total * 0.5)), tl.exp2(tl.where(strong != 0, total, 0.0))


@triton.jit
def segment_state(
    starts, before, entering, bh, segment, segments, c, columns,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, ENTERING: tl.constexpr,
):  # fmt: skip
    """The state before a segment [len(c), len(columns)]: what ``scan_segments`` left, and of what enters before all."""
    here = bh * segments + segment
    state = tile(starts + here * K * V, c, V, columns, 1, K, V)
    if ENTERING:
        left = tl.exp2(tl.load(before + here * WIDTH + (c if WIDTH > 1 else c * 0), mask=c < K, other=0.0))
        state += tile(entering + bh * K * V, c, V, columns, 1, K, V).to(tl.float32) * left[:, None]
    return state
