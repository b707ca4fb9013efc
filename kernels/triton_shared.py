"""Triton kernels that all gates share: the scan over segments, which is All-Scan one level down; the gradient of the
attention matrices inside of chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_compile.kernels.triton_math import chunk_rows, place, tile


@triton.jit(do_not_specialize=["segments"])
def scan_segments(
    states, decays, before, end, whole, segments,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From what each segment makes of a state, in its place, the state before it (REVERSE: after it) if nothing enters
    before all segments; and of what does enter, how much is left there.

    states [B*H, segments, K, V]; decays [B*H, segments, WIDTH] (log2; WIDTH is K or 1) -> before, the same summed over
    earlier segments; end [B*H, K, V], the state after all; whole [B*H, WIDTH], the natural logarithm of all decays. One
    program a (batch and head, tile of the state).
    """
    bh = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BK + tl.arange(0, BK)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    mask = (c < K)[:, None] & (columns < V)[None, :]
    at = c[:, None] * V + columns[None, :]
    gate = c if WIDTH > 1 else c * 0
    width = tl.where(tl.program_id(2) == 0, WIDTH, 0)
    state = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    here = bh * segments + (segments - 1 if REVERSE else 0)
    decay = tl.load(decays + here * WIDTH + gate, mask=c < K, other=0.0)
    added = tl.load(states + here * K * V + at, mask=mask, other=0.0)
    for s in range(segments):
        # asked for one segment ahead
        following = tl.minimum(s + 1, segments - 1)
        after = bh * segments + (segments - 1 - following if REVERSE else following)
        next_decay = tl.load(decays + after * WIDTH + gate, mask=c < K, other=0.0)
        next_added = tl.load(states + after * K * V + at, mask=mask, other=0.0)
        tl.store(states + here * K * V + at, state, mask=mask)
        tl.store(before + here * WIDTH + c, total, mask=c < width)
        state = state * tl.exp2(decay)[:, None] + added
        total += decay
        here, decay, added = after, next_decay, next_added
    tl.store(end + bh * K * V + at, state, mask=mask)
    tl.store(whole + bh * WIDTH + c, total * 0.6931471805599453, mask=c < width)


@triton.jit(do_not_specialize=["tokens", "chunks", "heads"])
def pairs_backward(
    v, do, dpairs,
    v_b, v_t, v_h, v_c, do_b, do_t, do_h, do_c,
    tokens, chunks, heads,
    V: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of each chunk's attention matrix, do v^T; one program a chunk. It needs no state."""
    chunk = tl.program_id(0).to(tl.int64)
    b, h, n = place(chunk, chunks, heads)
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    first, left = chunk_rows(n, tokens, CHUNK)
    v += b * v_b + h * v_h + first * v_t
    do += b * do_b + h * do_h + first * do_t
    out = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        grad = tile(do, rows, do_t, columns, do_c, left, V).to(DOT)
        value = tile(v, rows, v_t, columns, v_c, left, V).to(DOT)
        out = tl.dot(grad, tl.trans(value), out, input_precision=PRECISION)
    tl.store(dpairs + chunk * CHUNK * CHUNK + i * CHUNK + j, tl.where(i >= j, out, 0.0).to(DOT))
