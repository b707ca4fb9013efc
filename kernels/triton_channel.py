"""The Triton kernels for a log gate per channel: see ``fused.py`` for what they are parts of.

A chunk of CHUNK tokens is kept as two scaled operands, written once and read by every later pass. With G_t the sum of
the chunk's gates up to t, its own included, and r half of the chunk's total, per channel:

    ordinary channel    qe = scale q exp(G - r)    ke = k exp(r - G)         pairs = lower(qe ke^T)
    strong channel      qe = scale q exp(G)        ke = k exp(total - G)     exact in ``chunk_pairs``

A channel is strong in a chunk where |G - r| can exceed a limit, beyond which the ordinary operands overflow. Its
exponents are direct sums of the gates between two tokens and never positive, so no gate is too strong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_compile.kernels.triton_math import (
    chunk_factors,
    chunk_rows,
    gate_tile,
    selected_sums,
    store_columns,
    store_tile,
    tile,
)

_RUNTIME = ["tokens", "chunks", "per_segment", "heads", "all_chunks", "count"]


@triton.jit(do_not_specialize=_RUNTIME)
def operands(
    q, k, g, qe, ke, totals, strongs, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    tokens, chunks, heads,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, LIMIT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The operands of ordinary channels, each chunk's totals, and which channels are strong; one program a (chunk, tile
    of key channels). Those of strong ones are overwritten by ``strong_operands``: a branch for them here is slower."""
    tiles: tl.constexpr = WIDTH // BK
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    bh, n = chunk // chunks, chunk % chunks
    b, h = bh // heads, bh % heads
    rows = tl.arange(0, CHUNK)
    first, left = chunk_rows(n, tokens, CHUNK)
    gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
    query = tile(q + b * q_b + h * q_h + first * q_t, rows, q_t, c, q_c, left, K).to(tl.float32)
    key = tile(k + b * k_b + h * k_h + first * k_t, rows, k_t, c, k_c, left, K).to(tl.float32)
    after = selected_sums(rows[None, :] > rows[:, None], gate, DOT, PRECISION)
    total = tl.sum(gate, 0)
    # how far a sum can lie from the middle, whatever the gates' signs
    strong = (tl.sum(tl.abs(gate), 0) <= 2 * LIMIT).to(tl.int32) == 0
    down = after - total[None, :] * 0.5
    qe += chunk * CHUNK * WIDTH
    ke += chunk * CHUNK * WIDTH
    at = rows[:, None] * WIDTH + c[None, :]
    tl.store(qe + at, (query * tl.exp2(-down) * scale).to(DOT))
    tl.store(ke + at, (key * tl.exp2(down)).to(DOT))
    tl.store(totals + chunk * WIDTH + c, total)
    tl.store(strongs + chunk * WIDTH + c, strong.to(tl.int8))


@triton.jit
def _halves(query, key, gate, level, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The operands of the pairs between the two halves, of 2^level tokens, of each block of twice as many: queries of
    the right half with the decay over the gates from the middle to their own, keys of the left half with that over the
    gates after theirs; besides, that decay, which rows are right ones, and which pairs lie in one block."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    right = ((i >> level) & 1) == 1
    spanned = ((i >> level) == (j >> level)) & tl.where(right, j <= i, j > i)
    decay = tl.exp2(selected_sums(spanned, gate, DOT, PRECISION))
    late = tl.where(right, query * decay, 0.0).to(DOT)
    early = tl.where(right, 0.0, key * decay).to(DOT)
    return late, early, decay, right, (i >> (level + 1)) == (j >> (level + 1))


@triton.jit
def _any_strong(strongs, first, end, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Whether one of the chunks from ``first`` to ``end``, at most CHUNKS, has a strong channel. Most have none: this
    is all they cost."""
    n = first + tl.arange(0, CHUNKS).to(tl.int64)
    at = n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    flags = tl.load(strongs + at, mask=(n < end)[:, None] & (tl.arange(0, WIDTH) >= 0)[None, :], other=0)
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) != 0


@triton.jit(do_not_specialize=_RUNTIME)
def strong_operands(
    q, k, g, qe, ke, strongs, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The operands of strong channels; one program ``count`` chunks, at most CHUNKS."""
    start = tl.program_id(0).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not _any_strong(strongs, start, end, WIDTH, CHUNKS):
        return
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    for chunk in range(start, end):
        if _any_strong(strongs, chunk, end, WIDTH, 1):
            bh, n = chunk // chunks, chunk % chunks
            b, h = bh // heads, bh % heads
            first, left = chunk_rows(n, tokens, CHUNK)
            operand = chunk * CHUNK * WIDTH
            for channel in range(0, WIDTH, BK):
                c = channel + tl.arange(0, BK)
                strong = tl.load(strongs + chunk * WIDTH + c) != 0
                gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
                query = tile(q + b * q_b + h * q_h + first * q_t, rows, q_t, c, q_c, left, K).to(tl.float32)
                key = tile(k + b * k_b + h * k_h + first * k_t, rows, k_t, c, k_c, left, K).to(tl.float32)
                query *= tl.exp2(selected_sums(j <= i, gate, DOT, PRECISION)) * scale
                key *= tl.exp2(selected_sums(j > i, gate, DOT, PRECISION))
                store_columns(qe + operand, query, rows, WIDTH, c, strong, CHUNK, WIDTH)
                store_columns(ke + operand, key, rows, WIDTH, c, strong, CHUNK, WIDTH)


@triton.jit(do_not_specialize=_RUNTIME)
def chunk_pairs(
    q, k, g, qe, ke, strongs, pairs, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr, ALL: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention matrix inside of chunks of 2^LEVELS tokens: of ALL, or of those with strong channels.

    Of strong channels exact for every gate: a block's right half against its left one, with the boundary between them
    as the reference, and each half again as a block, down to single tokens. Every exponent is the sum of gates that
    lie between the two. One program ``count`` chunks, at most CHUNKS.
    """
    start = tl.program_id(0).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not ALL:  # noqa: SIM102 (the one is known when the kernel is compiled, the other when it runs)
        if not _any_strong(strongs, start, end, WIDTH, CHUNKS):
            return
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    for chunk in range(start, end):
        exact = _any_strong(strongs, chunk, end, WIDTH, 1)
        if ALL or exact:
            bh, n = chunk // chunks, chunk % chunks
            b, h = bh // heads, bh % heads
            first, left = chunk_rows(n, tokens, CHUNK)
            operand = chunk * CHUNK * WIDTH
            out = tl.zeros((CHUNK, CHUNK), tl.float32)
            for channel in range(0, WIDTH, BK):
                c = channel + tl.arange(0, BK)
                at = rows[:, None] * WIDTH + c[None, :]
                late, early = tl.load(qe + operand + at), tl.load(ke + operand + at)
                if exact:
                    here = (tl.load(strongs + chunk * WIDTH + c) != 0)[None, :]
                    late = tl.where(here, 0.0, late.to(tl.float32)).to(DOT)
                    early = tl.where(here, 0.0, early.to(tl.float32)).to(DOT)
                    gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
                    query = tile(q + b * q_b + h * q_h + first * q_t, rows, q_t, c, q_c, left, K)
                    query = query.to(tl.float32) * scale
                    key = tile(k + b * k_b + h * k_h + first * k_t, rows, k_t, c, k_c, left, K).to(tl.float32)
                    out = _exact_pairs(
                        out, tl.where(here, query, 0.0), key, gate, CHUNK, LEVELS, DOT, PRECISION
                    )
                ordinary = tl.dot(late, tl.trans(early), input_precision=PRECISION)
                # what overflowed above the diagonal is dropped
                out += tl.where(i >= j, ordinary, 0.0)
            tl.store(pairs + chunk * CHUNK * CHUNK + i * CHUNK + j, out.to(DOT))


@triton.jit
def _exact_pairs(
    out, query, key, gate,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    out += tl.where(i == j, tl.sum(query * key, 1)[:, None], 0.0)
    for level in range(LEVELS):
        late, early, _, _, same = _halves(query, key, gate, level, CHUNK, DOT, PRECISION)
        out += tl.where(same, tl.dot(late, tl.trans(early), input_precision=PRECISION), 0.0)
    return out


@triton.jit(do_not_specialize=_RUNTIME)
def segment_states(
    x, w, totals, strongs, states, decays,
    w_b, w_t, w_h, w_c,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment of chunks makes of a state, from the keys' operand x and the values w, and its decay.

    REVERSE: the gradient that its outputs give the state before it, from the queries' operand and the gradient of o.
    One program a (batch and head, segment, value tile).
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    w += b * w_b + h * w_h
    state = tl.zeros((BK, BV), tl.float32)
    decay = tl.zeros((BK,), tl.float32)
    out = tl.zeros((BK,), tl.float32)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    # A chunk's totals are asked for one chunk ahead: everything else waits for them.
    ahead = (bh * chunks + (end - 1 if REVERSE else begin)) * BK + c
    total, strong = tl.load(totals + ahead), tl.load(strongs + ahead)
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        following = tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1)
        ahead = (bh * chunks + following) * BK + c
        next_total, next_strong = tl.load(totals + ahead), tl.load(strongs + ahead)
        first, left = chunk_rows(n, tokens, CHUNK)
        operand = tl.load(x + (bh * chunks + n) * CHUNK * BK + rows[:, None] * BK + c[None, :])
        value = tile(w + first * w_t, rows, w_t, columns, w_c, left, V).to(DOT)
        side, inner = chunk_factors(total, strong)
        # as it stands between a chunk's operands; its own way out waits for the next chunk's way in
        state = state * (out * side * inner)[:, None]
        state = tl.dot(tl.trans(operand), value, state, input_precision=PRECISION)
        out = side
        decay += total
        total, strong = next_total, next_strong
    segments = tl.num_programs(1)
    state = state * out[:, None]
    store_tile(states + (bh * segments + segment) * K * V, state, c, V, columns, 1, K, V)
    written = tl.where(tl.program_id(2) == 0, K, 0)
    tl.store(decays + (bh * segments + segment) * K + c, decay, mask=c < written)


@triton.jit(do_not_specialize=_RUNTIME)
def read_out(
    x, y, w, totals, strongs, pairs, starts, out, saved,
    w_b, w_t, w_h, w_c, out_b, out_t, out_h,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, SAVE: tl.constexpr, PAIRS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of every token, from the queries' operand x, the keys' y, the values w and the state before each segment.

    REVERSE: dv, from the keys' operand, the queries', the gradient of o and that of the state after each segment. SAVE
    keeps the state that each chunk read, as it stood between the operands. PAIRS says that ``pairs`` holds all chunks,
    not only those with strong channels. One program a (batch and head, segment, value tile), with the state in
    registers.
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    w += b * w_b + h * w_h
    out += b * out_b + h * out_h
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    segments = tl.num_programs(1)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    # A chunk's totals are asked for one chunk ahead: everything else waits for them.
    ahead = (bh * chunks + (end - 1 if REVERSE else begin)) * BK + c
    strong = tl.load(strongs + ahead)
    side, inner = chunk_factors(tl.load(totals + ahead), strong)
    # the state as it stands between a chunk's operands
    state = tile(starts + (bh * segments + segment) * K * V, c, V, columns, 1, K, V) * side[:, None]
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        following = tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1)
        ahead = (bh * chunks + following) * BK + c
        next_total, next_strong = tl.load(totals + ahead), tl.load(strongs + ahead)
        chunk = bh * chunks + n
        at = rows[:, None] * BK + c[None, :]
        reader, writer = tl.load(x + chunk * CHUNK * BK + at), tl.load(y + chunk * CHUNK * BK + at)
        first, left = chunk_rows(n, tokens, CHUNK)
        value = tile(w + first * w_t, rows, w_t, columns, w_c, left, V).to(DOT)
        arriving = state.to(DOT)
        if SAVE:
            store_tile(saved + chunk * K * V, arriving, c, V, columns, 1, K, V)
        exact = tl.max(strong, 0) != 0
        if PAIRS or exact:
            square = pairs + chunk * CHUNK * CHUNK
            a = tl.load(square + (j * CHUNK + i if REVERSE else i * CHUNK + j)).to(tl.float32)
        else:
            a = tl.dot(reader, tl.trans(writer), input_precision=PRECISION)
        if exact:
            state = state * inner[:, None]
        # the other half goes here, and what overflowed in it
        a = tl.where(i <= j if REVERSE else i >= j, a, 0.0).to(DOT)
        result = tl.dot(a, value, input_precision=PRECISION)
        result = tl.dot(reader, arriving, result, input_precision=PRECISION)
        store_tile(out + first * out_t, result, rows, out_t, columns, 1, left, V)
        state = tl.dot(tl.trans(writer), value, state, input_precision=PRECISION)
        next_side, inner = chunk_factors(next_total, next_strong)
        state = state * (side * next_side)[:, None]
        side, strong = next_side, next_strong


@triton.jit
def _through_values(
    v, v_t, v_c, do, do_t, do_c, given, entering, leaving, rows, c, left,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over the value channels: of the gradient of all pairs, those above the diagonal too; of what goes through
    the state before the chunk and the one after it; and of one state's way to the other."""
    dpairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    dquery = tl.zeros((CHUNK, BK), tl.float32)
    dkey = tl.zeros((CHUNK, BK), tl.float32)
    through = tl.zeros((BK,), tl.float32)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        grad = tile(do, rows, do_t, columns, do_c, left, V).to(DOT)
        value = tile(v, rows, v_t, columns, v_c, left, V).to(DOT)
        before = tile(entering, c, V, columns, 1, K, V)
        after = tile(leaving, c, V, columns, 1, K, V)
        if not GIVEN:
            dpairs = tl.dot(grad, tl.trans(value), dpairs, input_precision=PRECISION)
        dquery = tl.dot(grad, tl.trans(before), dquery, input_precision=PRECISION)
        dkey = tl.dot(value, tl.trans(after), dkey, input_precision=PRECISION)
        through += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    if GIVEN:
        dpairs += tl.load(given + rows[:, None] * CHUNK + rows[None, :]).to(tl.float32)
    return dpairs, dquery, dkey, through


@triton.jit(do_not_specialize=_RUNTIME)
def operands_backward(
    qe, ke, v, g, do, given, totals, strongs, entering, leaving, dq, dk, dg, scale,
    v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c, do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
    tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of ordinary channels; one program a (chunk, tile of key channels). WIDTH is a row of qe and ke; GIVEN
    says that the pairs' gradient is there, from ``pairs_backward``.

    dg is a suffix sum of q dq - k dk over the very operands, rounded as they are, that entered the products: their
    rounding errors then cancel where the terms do. What spans no gate, a token with itself and the last one on its
    way out of the chunk, stays out of it: it would outweigh all that does where gates are strong.
    """
    tiles: tl.constexpr = WIDTH // BK
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    strong = tl.load(strongs + chunk * WIDTH + c)
    if tl.min(strong, 0) != 0:
        return
    bh, n = chunk // chunks, chunk % chunks
    b, h = bh // heads, bh % heads
    rows = tl.arange(0, CHUNK)
    first, left = chunk_rows(n, tokens, CHUNK)
    at = rows[:, None] * WIDTH + c[None, :]
    query, key = tl.load(qe + chunk * CHUNK * WIDTH + at), tl.load(ke + chunk * CHUNK * WIDTH + at)
    dpairs, dquery, dkey, through = _through_values(
        v + b * v_b + h * v_h + first * v_t, v_t, v_c, do + b * do_b + h * do_h + first * do_t, do_t, do_c,
        given + chunk * CHUNK * CHUNK, entering + chunk * K * V, leaving + chunk * K * V, rows, c, left,
        K, V, BK, BV, CHUNK, GIVEN, DOT, PRECISION,
    )  # fmt: skip
    i = rows[:, None]
    itself = tl.sum(tl.where(i == rows[None, :], dpairs, 0.0), 1)[:, None]
    dpairs = tl.where(i > rows[None, :], dpairs, 0.0).to(DOT)
    wide_query, wide_key = query.to(tl.float32), key.to(tl.float32)
    last = (rows >= left - 1)[:, None]
    through += tl.sum(tl.where(last, 0.0, wide_key * dkey), 0)
    dquery = tl.dot(dpairs, key, dquery, input_precision=PRECISION)
    dkey = tl.dot(tl.trans(dpairs), query, dkey, input_precision=PRECISION)
    dgate = wide_query * dquery - tl.where(last, 0.0, wide_key * dkey)
    dgate = selected_sums(rows[None, :] >= i, dgate, DOT, PRECISION) + through[None, :]
    dquery += itself * wide_key
    dkey += itself * wide_query
    gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
    down = selected_sums(rows[None, :] > i, gate, DOT, PRECISION)
    down -= tl.load(totals + chunk * WIDTH + c)[None, :] * 0.5
    start = b * dq_b + h * dq_h + first * dq_t
    store_columns(dq + start, dquery * tl.exp2(-down) * scale, rows, dq_t, c, strong == 0, left, K)
    store_columns(dk + start, dkey * tl.exp2(down), rows, dq_t, c, strong == 0, left, K)
    store_columns(dg + start, dgate, rows, dq_t, c, strong == 0, left, K)


@triton.jit(do_not_specialize=_RUNTIME)
def strong_operands_backward(
    q, k, v, g, do, given, totals, strongs, entering, leaving, dq, dk, dg, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
    do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of strong channels: as ``chunk_pairs`` splits them. dg sums just those pairs that span a gate.
    One program ``count`` chunks, at most CHUNKS, of one tile of key channels."""
    tiles: tl.constexpr = WIDTH // BK
    start = (tl.program_id(0) // tiles).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not _any_strong(strongs, start, end, WIDTH, CHUNKS):
        return
    c = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    for chunk in range(start, end):
        strong = tl.load(strongs + chunk * WIDTH + c) != 0
        if tl.max(strong.to(tl.int32), 0) != 0:
            _strong_chunk(
                q, k, v, g, do, given, totals, strong, entering, leaving, dq, dk, dg, scale,
                q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
                do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
                chunk, c, tokens, chunks, heads,
                K, V, WIDTH, BK, BV, CHUNK, LEVELS, GIVEN, DOT, PRECISION,
            )  # fmt: skip


@triton.jit
def _strong_chunk(
    q, k, v, g, do, given, totals, strong, entering, leaving, dq, dk, dg, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
    do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
    chunk, c, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, n = chunk // chunks, chunk % chunks
    b, h = bh // heads, bh % heads
    rows = tl.arange(0, CHUNK)
    first, left = chunk_rows(n, tokens, CHUNK)
    q += b * q_b + h * q_h + first * q_t
    k += b * k_b + h * k_h + first * k_t
    g += b * g_b + h * g_h + first * g_t
    dpairs, dquery, dkey, through = _through_values(
        v + b * v_b + h * v_h + first * v_t, v_t, v_c, do + b * do_b + h * do_h + first * do_t, do_t, do_c,
        given + chunk * CHUNK * CHUNK, entering + chunk * K * V, leaving + chunk * K * V, rows, c, left,
        K, V, BK, BV, CHUNK, GIVEN, DOT, PRECISION,
    )  # fmt: skip
    query = tile(q, rows, q_t, c, q_c, left, K).to(tl.float32) * scale
    key = tile(k, rows, k_t, c, k_c, left, K).to(tl.float32)
    gate = gate_tile(g, rows, g_t, c, g_c, left, K)
    i, j = rows[:, None], rows[None, :]
    dquery *= tl.exp2(selected_sums(j <= i, gate, DOT, PRECISION))
    dkey *= tl.exp2(selected_sums(j > i, gate, DOT, PRECISION))
    dgate = selected_sums(j >= i, query * dquery, DOT, PRECISION)
    dgate += selected_sums(j < i, key * dkey, DOT, PRECISION)
    dgate += (tl.exp2(tl.load(totals + chunk * WIDTH + c)) * through)[None, :]
    itself = tl.sum(tl.where(i == j, dpairs, 0.0), 1)[:, None]
    dquery += itself * key
    dkey += itself * query
    for level in range(LEVELS):
        late, early, decay, right, same = _halves(query, key, gate, level, CHUNK, DOT, PRECISION)
        part = tl.where(same, dpairs, 0.0).to(DOT)
        dlate = tl.where(right, tl.dot(part, early, input_precision=PRECISION), 0.0)
        dearly = tl.where(right, 0.0, tl.dot(tl.trans(part), late, input_precision=PRECISION))
        dquery += dlate * decay
        dkey += dearly * decay
        spanned = late.to(tl.float32) * dlate + early.to(tl.float32) * dearly
        within = ((i >> level) == (j >> level)) & tl.where(right, j >= i, j < i)
        dgate += selected_sums(within, spanned, DOT, PRECISION)
    start = b * dq_b + h * dq_h + first * dq_t
    store_columns(dq + start, dquery * scale, rows, dq_t, c, strong, left, K)
    store_columns(dk + start, dkey, rows, dq_t, c, strong, left, K)
    store_columns(dg + start, dgate, rows, dq_t, c, strong, left, K)
