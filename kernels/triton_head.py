"""The Triton kernels for one log gate per head and token, or none: see ``fused.py`` for what they are parts of.

A gate that all channels share leaves the products: pairs are (q k^T) * decay, with the decays of a chunk as a matrix
of their own. No operand is scaled beforehand, and no gate is too strong. Only the gates' sums inside of chunks are
made once, since a scan of 64 numbers takes as long as the products that wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_compile.kernels.triton_math import (
    chunk_rows,
    log2_gate,
    place,
    segment_state,
    selected_sums,
    store_tile,
    tile,
)

_RUNTIME = ["tokens", "chunks", "per_segment", "heads"]


@triton.jit(do_not_specialize=_RUNTIME)
def gate_sums(
    g, to, after, totals, large,
    g_b, g_t, g_h,
    tokens, chunks, heads,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """In each chunk the sums of the gates to each token, its own included, and of those after it (log2); each chunk's
    total; and whether its sums are so large that a difference of two is no longer exact. One program CHUNKS chunks."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    g += b * g_b + h * g_h
    n = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    t = n[:, None] * CHUNK + rows[None, :]
    gate = log2_gate(tl.load(g + t * g_t, mask=t < tokens, other=0.0))
    later = (rows < CHUNK - 1)[None, :] & (t + 1 < tokens)
    sums = tl.cumsum(gate, 1)
    at = bh * chunks * CHUNK + t
    inside = (n < chunks)[:, None] & (rows >= 0)[None, :]
    tl.store(to + at, sums, mask=inside)
    following = log2_gate(tl.load(g + (t + 1) * g_t, mask=later, other=0.0))
    tl.store(after + at, tl.cumsum(following, 1, reverse=True), mask=inside)
    tl.store(totals + bh * chunks + n, tl.sum(gate, 1), mask=n < chunks)
    tl.store(large + bh * chunks + n, (tl.max(tl.abs(sums), 1) > LIMIT).to(tl.int8), mask=n < chunks)


@triton.jit
def _decays(
    to, large, g, g_t, first, tokens, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):
    """exp2 of the sum of the gates of j < s <= i, [CHUNK, CHUNK], 0 above the diagonal."""
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    if large != 0:
        gate = log2_gate(tl.load(g + (first + rows) * g_t, mask=first + rows < tokens, other=0.0))
        exponents = selected_sums(j <= i, tl.where(i > j, gate[:, None], 0.0), DOT, PRECISION)
    else:
        exponents = to[:, None] - to[None, :]
    return tl.where(i >= j, tl.exp2(tl.where(i >= j, exponents, 0.0)), 0.0)


@triton.jit(do_not_specialize=_RUNTIME)
def segment_states(
    x, w, sums, totals, states, decays, scale,
    x_b, x_t, x_h, x_c, w_b, w_t, w_h, w_c,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment of chunks makes of a state, and its decay, from the keys x, the values w and the sums of the
    gates after each token.

    REVERSE: of the gradient of a state, from the queries, the gradient of o (times ``scale``), and the sums to each
    token. One program a (batch and head, segment, value tile).
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    x += b * x_b + h * x_h
    w += b * w_b + h * w_h
    state = tl.zeros((BK, BV), tl.float32)
    decay = tl.zeros((1,), tl.float32)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        chunk = bh * chunks + n
        first, left = chunk_rows(n, tokens, CHUNK)
        operand = tile(x + first * x_t, rows, x_t, c, x_c, left, K).to(DOT)
        value = tile(w + first * w_t, rows, w_t, columns, w_c, left, V)
        if GATED:
            total = tl.load(totals + chunk)
            state = state * tl.exp2(total)
            decay += total
            value = value.to(tl.float32) * (tl.exp2(tl.load(sums + chunk * CHUNK + rows)) * scale)[:, None]
        elif REVERSE:
            value = value.to(tl.float32) * scale
        state = tl.dot(tl.trans(operand), value.to(DOT), state, input_precision=PRECISION)
    segments = tl.num_programs(1)
    store_tile(states + (bh * segments + segment) * K * V, state, c, V, columns, 1, K, V)
    written = tl.where(tl.program_id(2) == 0, 1, 0)
    one = tl.arange(0, 1)
    tl.store(decays + bh * segments + segment + one, decay, mask=one < written)


@triton.jit(do_not_specialize=_RUNTIME)
def chunk_pairs(
    q, k, g, to, large, pairs,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h,
    tokens, chunks, heads,
    K: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    GATED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention matrix inside of each chunk, not yet scaled; one program a chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    b, h, n = place(chunk, chunks, heads)
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    first, left = chunk_rows(n, tokens, CHUNK)
    q += b * q_b + h * q_h + first * q_t
    k += b * k_b + h * k_h + first * k_t
    a = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first_key in range(0, K, BK):
        c = first_key + tl.arange(0, BK)
        query = tile(q, rows, q_t, c, q_c, left, K).to(DOT)
        key = tile(k, rows, k_t, c, k_c, left, K).to(DOT)
        a = tl.dot(query, tl.trans(key), a, input_precision=PRECISION)
    if GATED:
        sums, is_large = tl.load(to + chunk * CHUNK + rows), tl.load(large + chunk)
        gates = g + b * g_b + h * g_h
        a *= _decays(sums, is_large, gates, g_t, first, tokens, CHUNK, DOT, PRECISION)
    else:
        a = tl.where(i >= j, a, 0.0)
    tl.store(pairs + chunk * CHUNK * CHUNK + i * CHUNK + j, a.to(DOT))


@triton.jit(do_not_specialize=_RUNTIME)
def read_out(
    x, y, w, g, to, after, totals, large, pairs, starts, before, entering, out, saved, scale,
    x_b, x_t, x_h, x_c, y_b, y_t, y_h, y_c, w_b, w_t, w_h, w_c, g_b, g_t, g_h, out_b, out_t, out_h,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, SAVE: tl.constexpr, PAIRS: tl.constexpr, ENTERING: tl.constexpr, GATED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of every token, from the queries x, the keys y, the values w and the state before each segment.

    REVERSE: dv, from the keys, the queries, the gradient of o and that of the state after each segment. SAVE keeps the
    state that each chunk read; PAIRS says that ``pairs`` holds the chunks' attention matrices. One program a (batch
    and head, segment, value tile).
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK).to(tl.int64), tl.arange(0, BK)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    x += b * x_b + h * x_h
    y += b * y_b + h * y_h
    w += b * w_b + h * w_h
    out += b * out_b + h * out_h
    if GATED:
        g += b * g_b + h * g_h
    segments = tl.num_programs(1)
    width: tl.constexpr = 1
    state = segment_state(starts, before, entering, bh, segment, segments, c, columns, K, V, width, ENTERING)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    if GATED:
        # asked for one chunk ahead: they are in the way of everything else
        ahead = bh * chunks + (end - 1 if REVERSE else begin)
        total, is_large = tl.load(totals + ahead), tl.load(large + ahead)
        sums_to, sums_after = tl.load(to + ahead * CHUNK + rows), tl.load(after + ahead * CHUNK + rows)
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        chunk = bh * chunks + n
        # offsets from the first chunk: those of a chunk would stay in registers, of which there are not enough
        t = n * CHUNK + rows
        reader = tile(x, t, x_t, c, x_c, tokens, K).to(DOT)
        writer = tile(y, t, y_t, c, y_c, tokens, K).to(DOT)
        value = tile(w, t, w_t, columns, w_c, tokens, V)
        if REVERSE:
            value = (value.to(tl.float32) * scale).to(DOT)
        arriving = state.to(DOT)
        if SAVE:
            store_tile(saved + chunk * K * V, arriving, c, V, columns, 1, K, V)
        if PAIRS:
            a = tl.load(pairs + chunk * CHUNK * CHUNK + (j * CHUNK + i if REVERSE else i * CHUNK + j))
        else:
            a = tl.dot(reader, tl.trans(writer), input_precision=PRECISION)
            if GATED:
                decays = _decays(sums_to, is_large, g, g_t, n * CHUNK, tokens, CHUNK, DOT, PRECISION)
                a = a * (tl.trans(decays) if REVERSE else decays)
            else:
                a = tl.where(i <= j if REVERSE else i >= j, a, 0.0)
        result = tl.dot(reader, arriving, input_precision=PRECISION)
        written = value.to(DOT)
        if GATED:
            result = result * tl.exp2(sums_after if REVERSE else sums_to)[:, None]
            state = state * tl.exp2(total)
            written = (value.to(tl.float32) * tl.exp2(sums_to if REVERSE else sums_after)[:, None]).to(DOT)
        result = tl.dot(a.to(DOT), value.to(DOT), result, input_precision=PRECISION)
        if not REVERSE:
            result = result * scale
        store_tile(out, result, t, out_t, columns, 1, tokens, V)
        state = tl.dot(tl.trans(writer), written, state, input_precision=PRECISION)
        if GATED:
            ahead = bh * chunks + (tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1))
            total, is_large = tl.load(totals + ahead), tl.load(large + ahead)
            sums_to, sums_after = tl.load(to + ahead * CHUNK + rows), tl.load(after + ahead * CHUNK + rows)


@triton.jit(do_not_specialize=_RUNTIME)
def operands_backward(
    q, k, v, g, to, after, totals, large, do, given, entering, leaving, dq, dk, dg, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h,
    do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h, dg_b, dg_t, dg_h,
    tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    GIVEN: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg; one program a chunk. GIVEN says that the pairs' gradient is there, from ``pairs_backward``.

    dg sums what spans a gate: pairs inside of the chunk, outputs that read the state before it, keys that reach the
    state after it, and the one state's way to the other.
    """
    chunk = tl.program_id(0).to(tl.int64)
    b, h, n = place(chunk, chunks, heads)
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    first, left = chunk_rows(n, tokens, CHUNK)
    q += b * q_b + h * q_h + first * q_t
    k += b * k_b + h * k_h + first * k_t
    v += b * v_b + h * v_h + first * v_t
    do += b * do_b + h * do_h + first * do_t
    entering += chunk * K * V
    leaving += chunk * K * V
    dpairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    if GIVEN:
        dpairs += tl.load(given + chunk * CHUNK * CHUNK + i * CHUNK + j).to(tl.float32)
    else:
        for start in range(0, V, BV):
            columns = start + tl.arange(0, BV)
            grad = tile(do, rows, do_t, columns, do_c, left, V).to(DOT)
            value = tile(v, rows, v_t, columns, v_c, left, V).to(DOT)
            dpairs = tl.dot(grad, tl.trans(value), dpairs, input_precision=PRECISION)
    if GATED:
        sums = tl.load(to + chunk * CHUNK + rows)
        gates = g + b * g_b + h * g_h
        decays = _decays(sums, tl.load(large + chunk), gates, g_t, first, tokens, CHUNK, DOT, PRECISION)
        dpairs = dpairs * decays * scale
        since, until = tl.exp2(sums) * scale, tl.exp2(tl.load(after + chunk * CHUNK + rows))
    else:
        dpairs = tl.where(i >= j, dpairs, 0.0) * scale
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    span = tl.zeros((CHUNK,), tl.float32)
    reach = tl.zeros((CHUNK,), tl.float32)
    through = 0.0
    for first_key in range(0, K, BK):
        c = first_key + tl.arange(0, BK)
        query = tile(q, rows, q_t, c, q_c, left, K).to(DOT)
        key = tile(k, rows, k_t, c, k_c, left, K).to(DOT)
        dquery = tl.zeros((CHUNK, BK), tl.float32)
        dkey = tl.zeros((CHUNK, BK), tl.float32)
        for start in range(0, V, BV):
            columns = start + tl.arange(0, BV)
            grad = tile(do, rows, do_t, columns, do_c, left, V).to(DOT)
            value = tile(v, rows, v_t, columns, v_c, left, V).to(DOT)
            before = tile(entering, c, V, columns, 1, K, V)
            behind = tile(leaving, c, V, columns, 1, K, V)
            dquery = tl.dot(grad, tl.trans(before), dquery, input_precision=PRECISION)
            dkey = tl.dot(value, tl.trans(behind), dkey, input_precision=PRECISION)
            if GATED:
                through += tl.sum(tl.sum(before.to(tl.float32) * behind.to(tl.float32), 1), 0)
        if GATED:
            dquery = dquery * since[:, None]
            dkey = dkey * until[:, None]
            pairs = tl.dot(query, tl.trans(key), pairs, input_precision=PRECISION)
            span += tl.sum(query.to(tl.float32) * dquery, 1)
            reach += tl.sum(key.to(tl.float32) * dkey, 1)
        else:
            dquery = dquery * scale
        dquery = tl.dot(dpairs.to(DOT), key, dquery, input_precision=PRECISION)
        dkey = tl.dot(tl.trans(dpairs.to(DOT)), query, dkey, input_precision=PRECISION)
        at = b * dq_b + h * dq_h + first * dq_t
        store_tile(dq + at, dquery, rows, dq_t, c, 1, left, K)
        store_tile(dk + at, dkey, rows, dq_t, c, 1, left, K)
    if GATED:
        # a pair (i, j) spans the gates j < s <= i, so a token and itself span none
        inside = tl.where(i > j, pairs * dpairs, 0.0)
        span += tl.sum(inside, 1) - tl.sum(inside, 0)
        # summed by itself: a running sum less its last term keeps that term's rounding error
        reached = tl.sum(tl.where(j < i, reach[None, :], 0.0), 1)
        spanned = tl.sum(tl.where(j >= i, span[None, :], 0.0), 1)
        dgate = spanned + reached + tl.exp2(tl.load(totals + chunk)) * through
        gates = dg + b * dg_b + h * dg_h + first * dg_t
        tl.store(gates + rows * dg_t, dgate.to(dg.dtype.element_ty), mask=rows < left)
