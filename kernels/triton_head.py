"""The Triton kernels for one log gate per head and token, or none: see ``fused.py`` for what they are parts of.

A gate that all channels share leaves the products: it weighs tokens, not channels. With G_t the sum of the chunk's
gates up to t, its own included, and r half of the chunk's total:

    ordinary chunk      o_i = exp(G_i - r) (state q_i + sum over j <= i of exp(r - G_j) v_j (k_j q_i))
    strong chunk        o_i = exp(G_i) state q_i + sum of v_j pairs_ij, exact in ``chunk_pairs``; v_j exp(total - G_j)
                        enters the state

Strong is a chunk where |G - r| can exceed a limit, beyond which the ordinary weights overflow. Only the weights'
exponents are made once, since a scan of 64 numbers takes as long as the products that wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_compile.kernels.triton_math import (
    chunk_factors,
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
    g, to, after, totals, strongs,
    g_b, g_t, g_h,
    tokens, chunks, heads,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The exponents (log2) with which each token reads, G - r, and writes, r - G; in a strong chunk G and total - G,
    the latter summed by itself. Each chunk's total, and whether it is strong. One program CHUNKS chunks."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    g += b * g_b + h * g_h
    n = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    t = n[:, None] * CHUNK + rows[None, :]
    gate = log2_gate(tl.load(g + t * g_t, mask=t < tokens, other=0.0))
    later = (rows < CHUNK - 1)[None, :] & (t + 1 < tokens)
    following = log2_gate(tl.load(g + (t + 1) * g_t, mask=later, other=0.0))
    total = tl.sum(gate, 1)
    # how far a sum can lie from the middle, whatever the gates' signs; NaN is none of both, and stays one
    strong = tl.sum(tl.abs(gate), 1) > 2 * LIMIT
    middle = tl.where(strong, 0.0, total * 0.5)[:, None]
    at = bh * chunks * CHUNK + t
    inside = (n < chunks)[:, None] & (rows >= 0)[None, :]
    tl.store(to + at, tl.cumsum(gate, 1) - middle, mask=inside)
    tl.store(after + at, tl.cumsum(following, 1, reverse=True) - middle, mask=inside)
    tl.store(totals + bh * chunks + n, total, mask=n < chunks)
    tl.store(strongs + bh * chunks + n, strong.to(tl.int8), mask=n < chunks)


@triton.jit
def _decays(
    to, strong, g, g_t, first, tokens, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):
    """exp2 of the sum of the gates of j < s <= i, [CHUNK, CHUNK], 0 above the diagonal."""
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    if strong != 0:
        gate = log2_gate(tl.load(g + (first + rows) * g_t, mask=first + rows < tokens, other=0.0))
        exponents = selected_sums(j <= i, tl.where(i > j, gate[:, None], 0.0), DOT, PRECISION)
    else:
        exponents = to[:, None] - to[None, :]
    return tl.where(i >= j, tl.exp2(tl.where(i >= j, exponents, 0.0)), 0.0)


@triton.jit(do_not_specialize=_RUNTIME)
def segment_states(
    x, w, exponents, totals, strongs, states, decays, scale,
    x_b, x_t, x_h, x_c, w_b, w_t, w_h, w_c,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment of chunks makes of a state, and its decay, from the keys x, the values w and the exponents with
    which tokens write.

    REVERSE: of the gradient of a state, from the queries, the gradient of o (times ``scale``), and the exponents with
    which tokens read. One program a (batch and head, segment, value tile), its state transposed: weighed values are
    then a left operand, from registers.
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    x += b * x_b + h * x_h
    w += b * w_b + h * w_h
    state = tl.zeros((BV, BK), tl.float32)
    decay = tl.zeros((1,), tl.float32)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    out = 1.0
    if GATED:
        # asked for one chunk ahead: they are in the way of everything else
        ahead = bh * chunks + (end - 1 if REVERSE else begin)
        total, strong = tl.load(totals + ahead), tl.load(strongs + ahead)
        exponent = tl.load(exponents + ahead * CHUNK + rows)
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        first, left = chunk_rows(n, tokens, CHUNK)
        operand = tile(x + first * x_t, rows, x_t, c, x_c, left, K).to(DOT)
        value = tl.trans(tile(w + first * w_t, rows, w_t, columns, w_c, left, V))
        if GATED:
            side, inner = chunk_factors(total, strong)
            # as it stands between a chunk's tokens; its own way out waits for the next chunk's way in
            state = state * (out * side * inner)
            out = side
            decay += total
            value = value.to(tl.float32) * (tl.exp2(exponent) * scale)[None, :]
            ahead = bh * chunks + (tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1))
            total, strong = tl.load(totals + ahead), tl.load(strongs + ahead)
            exponent = tl.load(exponents + ahead * CHUNK + rows)
        elif REVERSE:
            value = value.to(tl.float32) * scale
        state = tl.dot(value.to(DOT), operand, state, input_precision=PRECISION)
    segments = tl.num_programs(1)
    store_tile(states + (bh * segments + segment) * K * V, tl.trans(state * out), c, V, columns, 1, K, V)
    written = tl.where(tl.program_id(2) == 0, 1, 0)
    one = tl.arange(0, 1)
    tl.store(decays + bh * segments + segment + one, decay, mask=one < written)


@triton.jit(do_not_specialize=_RUNTIME)
def chunk_pairs(
    q, k, g, to, strongs, pairs,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ALL: tl.constexpr,
    GATED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention matrix inside of chunks, not yet scaled: of ALL, or of the strong ones. One program ``count``
    chunks, at most CHUNKS."""
    start = tl.program_id(0).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not ALL:
        # most have none: this is all they cost
        several = start + tl.arange(0, CHUNKS)
        if tl.max(tl.load(strongs + several, mask=several < end, other=0).to(tl.int32), 0) == 0:
            return
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    for chunk in range(start, end):
        strong = tl.load(strongs + chunk).to(tl.int32) if GATED else 0
        if ALL or strong != 0:
            b, h, n = place(chunk, chunks, heads)
            first, left = chunk_rows(n, tokens, CHUNK)
            queries = q + b * q_b + h * q_h + first * q_t
            keys = k + b * k_b + h * k_h + first * k_t
            a = tl.zeros((CHUNK, CHUNK), tl.float32)
            for first_key in range(0, K, BK):
                c = first_key + tl.arange(0, BK)
                query = tile(queries, rows, q_t, c, q_c, left, K).to(DOT)
                key = tile(keys, rows, k_t, c, k_c, left, K).to(DOT)
                a = tl.dot(query, tl.trans(key), a, input_precision=PRECISION)
            if GATED:
                sums = tl.load(to + chunk * CHUNK + rows)
                gates = g + b * g_b + h * g_h
                a *= _decays(sums, strong, gates, g_t, first, tokens, CHUNK, DOT, PRECISION)
            else:
                a = tl.where(i >= j, a, 0.0)
            tl.store(pairs + chunk * CHUNK * CHUNK + i * CHUNK + j, a.to(DOT))


@triton.jit(do_not_specialize=_RUNTIME)
def read_out(
    x, y, w, to, after, totals, strongs, pairs, starts, before, entering, out, saved, scale,
    x_b, x_t, x_h, x_c, y_b, y_t, y_h, y_c, w_b, w_t, w_h, w_c, out_b, out_t, out_h,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, SAVE: tl.constexpr, PAIRS: tl.constexpr, ENTERING: tl.constexpr, GATED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of every token, from the queries x, the keys y, the values w and the state before each segment.

    REVERSE: dv, from the keys, the queries, the gradient of o and that of the state after each segment. SAVE keeps the
    state that each chunk read, as it stood between the weights, transposed. PAIRS says that ``pairs`` holds all chunks'
    attention matrices, not only those of strong chunks. One program a (batch and head, segment, value tile), transposed
    as its namesake for a gate per channel.
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    i, j = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    x += b * x_b + h * x_h
    y += b * y_b + h * y_h
    w += b * w_b + h * w_h
    out += b * out_b + h * out_h
    segments = tl.num_programs(1)
    width: tl.constexpr = 1
    state = segment_state(starts, before, entering, bh, segment, segments, c, columns, K, V, width, ENTERING)
    state = tl.trans(state)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    if GATED:
        # asked for one chunk ahead: they are in the way of everything else
        ahead = bh * chunks + (end - 1 if REVERSE else begin)
        strong = tl.load(strongs + ahead)
        side, inner = chunk_factors(tl.load(totals + ahead), strong)
        state = state * side
        reading = tl.load((after if REVERSE else to) + ahead * CHUNK + rows)
        writing = tl.load((to if REVERSE else after) + ahead * CHUNK + rows)
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        chunk = bh * chunks + n
        # offsets from the first chunk: those of a chunk would stay in registers, of which there are not enough
        t = tl.cast(n, tl.int64) * CHUNK + rows
        reader = tile(x, t, x_t, c, x_c, tokens, K).to(DOT)
        writer = tile(y, t, y_t, c, y_c, tokens, K).to(DOT)
        value = tl.trans(tile(w, t, w_t, columns, w_c, tokens, V).to(DOT))
        arriving = state.to(DOT)
        if SAVE:
            store_tile(saved + chunk * K * V, arriving, columns, K, c, 1, V, K)
        # the gradient of o is scaled as it comes in, o as it goes out
        if GATED:
            read, written = tl.exp2(reading), tl.exp2(writing) * (scale if REVERSE else 1.0)
        if PAIRS or (strong != 0 if GATED else False):
            square = pairs + chunk * CHUNK * CHUNK
            a = tl.load(square + (j * CHUNK + i if REVERSE else i * CHUNK + j)).to(tl.float32)
            if REVERSE:
                a *= scale
        else:
            a = tl.dot(writer, tl.trans(reader), input_precision=PRECISION)
            if GATED:
                a *= written[:, None] * read[None, :]
            elif REVERSE:
                a *= scale
            # the other half goes here, and what overflowed in it
            a = tl.where(i <= j if REVERSE else i >= j, a, 0.0)
        result = tl.dot(arriving, tl.trans(reader), input_precision=PRECISION)
        if GATED:
            result *= read[None, :]
        result = tl.dot(value, a.to(DOT), result, input_precision=PRECISION)
        if not REVERSE:
            result *= scale
        store_tile(out, tl.trans(result), t, out_t, columns, 1, tokens, V)
        if GATED:
            weighed = (value.to(tl.float32) * written[None, :]).to(DOT)
            state = tl.dot(weighed, writer, state * inner, input_precision=PRECISION)
            ahead = bh * chunks + (tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1))
            strong = tl.load(strongs + ahead)
            next_side, inner = chunk_factors(tl.load(totals + ahead), strong)
            state *= side * next_side
            side = next_side
            reading = tl.load((after if REVERSE else to) + ahead * CHUNK + rows)
            writing = tl.load((to if REVERSE else after) + ahead * CHUNK + rows)
        else:
            weighed = (value.to(tl.float32) * scale).to(DOT) if REVERSE else value
            state = tl.dot(weighed, writer, state, input_precision=PRECISION)


@triton.jit(do_not_specialize=_RUNTIME)
def operands_backward(
    q, k, v, g, to, after, totals, strongs, do, given, entering, leaving, dq, dk, dg, scale,
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
        strong, total = tl.load(strongs + chunk), tl.load(totals + chunk)
        decays = _decays(sums, strong, gates, g_t, first, tokens, CHUNK, DOT, PRECISION)
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
            before = tile(entering, columns, K, c, 1, V, K)
            behind = tile(leaving, columns, K, c, 1, V, K)
            dquery = tl.dot(grad, before, dquery, input_precision=PRECISION)
            dkey = tl.dot(value, behind, dkey, input_precision=PRECISION)
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
        # between the weights the two states have half of the decay each
        dgate = spanned + reached + tl.exp2(tl.where(strong != 0, total, 0.0)) * through
        gates = dg + b * dg_b + h * dg_h + first * dg_t
        tl.store(gates + rows * dg_t, dgate.to(dg.dtype.element_ty), mask=rows < left)
