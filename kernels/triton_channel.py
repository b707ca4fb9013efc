"""The Triton kernels for a log gate per channel: see ``fused.py`` for what they are parts of.

A chunk of CHUNK tokens is kept as two scaled operands, written once and read by every later pass. With G_t the sum of
the chunk's gates up to t, its own included, and r half of the chunk's total, per channel:

    ordinary channel    qe = scale q exp(G - r)    ke = k exp(r - G)         pairs = lower(qe ke^T)
    strong channel      qe = scale q exp(G)        ke = k exp(total - G)     exact in ``chunk_pairs``

A tile of channels is strong in a chunk where |G - r| of one of them can exceed a limit, beyond which the ordinary
operands overflow. Its exponents are direct sums of the gates between two tokens, so no gate is too strong: they are
never positive, except inside of blocks of 2^base tokens, so short that they cannot exceed a limit there. The gates
decide how short, down to single tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_compile.kernels.triton_math import (
    chunk_factors,
    chunk_rows,
    gate_tile,
    place,
    segment_state,
    selected_sums,
    store_tile,
    tile,
)

_RUNTIME = ["tokens", "chunks", "per_segment", "heads", "all_chunks", "count"]


@triton.jit(do_not_specialize=_RUNTIME)
def operands(
    q, k, g, qe, ke, totals, strongs, weights, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    tokens, chunks, heads,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_LIMIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The operands, each chunk's totals, and for each channel 0, or 1 + the base of a strong tile; one program a
    (chunk, tile of key channels). And the weights, see ``_write_weights``."""
    _write_weights(weights, LEVELS)
    tiles: tl.constexpr = WIDTH // BK
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    b, h, n = place(chunk, chunks, heads)
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    first, left = chunk_rows(n, tokens, CHUNK)
    gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
    query = tile(q + b * q_b + h * q_h + first * q_t, rows, q_t, c, q_c, left, K).to(tl.float32)
    key = tile(k + b * k_b + h * k_h + first * k_t, rows, k_t, c, k_c, left, K).to(tl.float32)
    after = selected_sums(j > i, gate, DOT, PRECISION)
    total = tl.sum(gate, 0)
    # how far a sum can lie from the middle, whatever the gates' signs
    ordinary = tl.min((tl.sum(tl.abs(gate), 0) <= 2 * LIMIT).to(tl.int32), 0) != 0
    qe += chunk * CHUNK * WIDTH
    ke += chunk * CHUNK * WIDTH
    at = i * WIDTH + c[None, :]
    tl.store(totals + chunk * WIDTH + c, total)
    if ordinary:
        down = after - total[None, :] * 0.5
        tl.store(qe + at, (query * tl.exp2(-down) * scale).to(DOT))
        tl.store(ke + at, (key * tl.exp2(down)).to(DOT))
        tl.store(strongs + chunk * WIDTH + c, tl.zeros((BK,), tl.int8))
    else:
        base = _strong_operands(
            q + b * q_b + h * q_h + first * q_t, k + b * k_b + h * k_h + first * k_t,
            g + b * g_b + h * g_h + first * g_t, qe, ke, scale, q_t, q_c, k_t, k_c, g_t, g_c,
            rows, tl.program_id(0) % tiles * BK, left,
            K, WIDTH, BK, CHUNK, LEVELS, BLOCK_LIMIT, DOT, PRECISION,
        )  # fmt: skip
        tl.store(strongs + chunk * WIDTH + c, (tl.zeros((BK,), tl.int32) + base + 1).to(tl.int8))


@triton.jit
def _strong_operands(
    q, k, g, qe, ke, scale, q_t, q_c, k_t, k_c, g_t, g_c, rows, channel, left,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_LIMIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The operands of a strong tile, and its base. Loaded again and in narrow tiles: what ordinary tiles take would
    take longer with more registers."""
    narrow: tl.constexpr = BK if BK <= 32 else 32
    base = LEVELS
    for start in range(0, BK, narrow):
        c = channel + start + tl.arange(0, narrow)
        at = rows[:, None] * WIDTH + c[None, :]
        gate = gate_tile(g, rows, g_t, c, g_c, left, K)
        base = tl.minimum(base, _base(gate, CHUNK, LEVELS, BLOCK_LIMIT, DOT, PRECISION))
        query = tile(q, rows, q_t, c, q_c, left, K).to(tl.float32)
        query *= tl.exp2(selected_sums(rows[None, :] <= rows[:, None], gate, DOT, PRECISION)) * scale
        tl.store(qe + at, query.to(DOT))
        key = tile(k, rows, k_t, c, k_c, left, K).to(tl.float32)
        key *= tl.exp2(selected_sums(rows[None, :] > rows[:, None], gate, DOT, PRECISION))
        tl.store(ke + at, key.to(DOT))
    return base


@triton.jit
def _base(
    gate, CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_LIMIT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest base, at most LEVELS, such that between the tokens of no block of 2^base gates sum up to more than
    twice the limit. Row n of the sums is node n of the binary tree whose leaves are the tokens, CHUNK and up."""
    node, j = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    height = tl.full((CHUNK,), LEVELS, tl.int32)
    for level in tl.static_range(1, LEVELS):
        height -= ((node >> level) != 0).to(tl.int32)
    size = (1 << height)[:, None]
    # a block's first gate lies before all of its tokens
    between = ((j + CHUNK) >> height[:, None] == node[:, None]) & ((j & (size - 1)) != 0)
    sums = tl.dot(tl.where(between, 1.0, 0.0).to(DOT), tl.abs(gate).to(DOT), input_precision=PRECISION)
    fits = tl.max(sums, 1) <= 2 * BLOCK_LIMIT
    return tl.min(tl.where(fits, LEVELS, height - 1), 0)


@triton.jit
def _write_weights(weights, LEVELS: tl.constexpr):
    """How gates enter the exponents of strong tiles, as matrices to be multiplied with, which take too many
    instructions to be made where they are used. At (token i, gate of token j), of 2^LEVELS tokens:

    from 0              on level l, 1 where j lies between i and the middle of i's block of 2^(l + 1) tokens
    from LEVELS         in blocks of 2^base tokens, i's less an earlier token's is the sum between the two, and none
                        exceeds half of all between the block's: a half for j up to i, minus a half for j after i
    2 LEVELS + 1 and 2  1 where j is not after i; where it is
    """
    size: tl.constexpr = 1 << LEVELS
    i, j = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    for n in range(tl.program_id(0), 2 * LEVELS + 3, tl.num_programs(0)):
        to_middle = ((i >> n) == (j >> n)) & ((((i >> n) & 1) == 1) == (j <= i))
        base = n - LEVELS
        inside = ((i >> base) == (j >> base)) & ((j & ((1 << base) - 1)) != 0)
        halves = tl.where(inside, tl.where(j <= i, 0.5, -0.5), 0.0)
        sums = tl.where((j <= i) == (n == 2 * LEVELS + 1), 1.0, 0.0)
        values = tl.where(n < LEVELS, tl.where(to_middle, 1.0, 0.0), tl.where(n <= 2 * LEVELS, halves, sums))
        tl.store(weights + n * size * size + i * size + j, values.to(weights.dtype.element_ty))


@triton.jit
def _weights(weights, n, rows, CHUNK: tl.constexpr):
    return tl.load(weights + n * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])


@triton.jit
def _block(query, key, gate, between, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The operands of the pairs inside of each block of 2^base tokens, and the decays that they have."""
    exponent = selected_sums(between, gate, DOT, PRECISION)
    since, until = tl.exp2(exponent), tl.exp2(-exponent)
    return (query * since).to(DOT), (key * until).to(DOT), since, until


@triton.jit
def _across(i, j, level):
    """Whether tokens i and j lie in the two halves, of 2^level tokens, of one block."""
    return (i >> level) == ((j >> level) ^ 1)


@triton.jit
def _halves(query, key, gate, to_middle, right, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The operand of the pairs between the two halves, of 2^level tokens, of each block of twice as many: queries of
    the ``right`` half with the decay over the gates from the middle to their own, keys of the left half with that over
    the gates after theirs. Its product with itself has these pairs where tokens lie ``_across``."""
    decay = tl.exp2(selected_sums(to_middle, gate, DOT, PRECISION))
    return (tl.where(right, query, key) * decay).to(DOT)


@triton.jit
def _any_strong(strongs, first, end, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Whether one of the chunks from ``first`` to ``end``, at most CHUNKS, has a strong channel. Most have none: this
    is all they cost."""
    n = first + tl.arange(0, CHUNKS).to(tl.int64)
    at = n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    flags = tl.load(strongs + at, mask=(n < end)[:, None] & (tl.arange(0, WIDTH) >= 0)[None, :], other=0)
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) != 0


@triton.jit(do_not_specialize=_RUNTIME)
def chunk_pairs(
    q, k, g, qe, ke, strongs, weights, pairs, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr, ALL: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention matrix inside of chunks of 2^LEVELS tokens: of ALL, or of those with strong tiles.

    Of strong tiles exact for every gate: a block's right half against its left one, with the boundary between them as
    the reference, and each half again as a block, down to blocks of 2^base tokens. Every exponent is the sum of gates
    that lie between the two. One program ``count`` chunks, at most CHUNKS.
    """
    start = tl.program_id(0).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not ALL:  # noqa: SIM102 (the one is known when the kernel is compiled, the other when it runs)
        if not _any_strong(strongs, start, end, WIDTH, CHUNKS):
            return
    rows = tl.arange(0, CHUNK)
    i, j = rows[:, None], rows[None, :]
    for chunk in range(start, end):
        if ALL or _any_strong(strongs, chunk, end, WIDTH, 1):
            b, h, n = place(chunk, chunks, heads)
            first, left = chunk_rows(n, tokens, CHUNK)
            out = tl.zeros((CHUNK, CHUNK), tl.float32)
            for channel in range(0, WIDTH, BK):
                c = channel + tl.arange(0, BK)
                base = tl.load(strongs + chunk * WIDTH + channel).to(tl.int32) - 1
                if base >= 0:
                    gate = gate_tile(g + b * g_b + h * g_h + first * g_t, rows, g_t, c, g_c, left, K)
                    query = tile(q + b * q_b + h * q_h + first * q_t, rows, q_t, c, q_c, left, K)
                    query = query.to(tl.float32) * scale
                    key = tile(k + b * k_b + h * k_h + first * k_t, rows, k_t, c, k_c, left, K).to(tl.float32)
                    between = _weights(weights, LEVELS + base, rows, CHUNK)
                    late, early, _since, _until = _block(query, key, gate, between, DOT, PRECISION)
                    product = tl.dot(late, tl.trans(early), input_precision=PRECISION)
                    out += tl.where((i >> base) == (j >> base), product, 0.0)
                    for level in range(base, LEVELS):
                        to_middle = _weights(weights, level, rows, CHUNK)
                        right = ((i >> level) & 1) == 1
                        x = _halves(query, key, gate, to_middle, right, DOT, PRECISION)
                        product = tl.dot(x, tl.trans(x), input_precision=PRECISION)
                        out += tl.where(_across(i, j, level), product, 0.0)
                else:
                    at = chunk * CHUNK * WIDTH + i * WIDTH + c[None, :]
                    late, early = tl.load(qe + at), tl.load(ke + at)
                    out = tl.dot(late, tl.trans(early), out, input_precision=PRECISION)
            # above the diagonal all may have overflowed
            out = tl.where(i >= j, out, 0.0)
            tl.store(pairs + chunk * CHUNK * CHUNK + i * CHUNK + j, out.to(DOT))


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
    x, y, w, totals, strongs, pairs, starts, before, entering, out, saved,
    w_b, w_t, w_h, w_c, out_b, out_t, out_h,
    tokens, chunks, per_segment, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr, SAVE: tl.constexpr, PAIRS: tl.constexpr, ENTERING: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of every token, from the queries' operand x, the keys' y, the values w and the state before each segment.

    REVERSE: dv, from the keys' operand, the queries', the gradient of o and that of the state after each segment. SAVE
    keeps the state that each chunk read, as it stood between the operands. PAIRS says that ``pairs`` holds all chunks,
    not only those with strong channels. One program a (batch and head, segment, value tile).

    All products are transposed, value channels by tokens: the state, [BV, BK] in registers, is then a left operand,
    which is taken from there. A right one would go through shared memory in every chunk.
    """
    bh = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    b, h = bh // heads, bh % heads
    rows, c = tl.arange(0, CHUNK), tl.arange(0, BK)
    w += b * w_b + h * w_h
    out += b * out_b + h * out_h
    i, j = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    segments = tl.num_programs(1)
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    # A chunk's totals are asked for one chunk ahead: everything else waits for them.
    ahead = (bh * chunks + (end - 1 if REVERSE else begin)) * BK + c
    strong = tl.load(strongs + ahead)
    side, inner = chunk_factors(tl.load(totals + ahead), strong)
    # the state as it stands between a chunk's operands
    state = segment_state(starts, before, entering, bh, segment, segments, c, columns, K, V, K, ENTERING)
    state = tl.trans(state) * side[None, :]
    for step in range(end - begin):
        n = end - 1 - step if REVERSE else begin + step
        following = tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1)
        ahead = (bh * chunks + following) * BK + c
        next_total, next_strong = tl.load(totals + ahead), tl.load(strongs + ahead)
        chunk = bh * chunks + n
        at = rows[:, None] * BK + c[None, :]
        reader, writer = tl.load(x + chunk * CHUNK * BK + at), tl.load(y + chunk * CHUNK * BK + at)
        first, left = chunk_rows(n, tokens, CHUNK)
        value = tl.trans(tile(w + first * w_t, rows, w_t, columns, w_c, left, V).to(DOT))
        arriving = state.to(DOT)
        if SAVE:
            store_tile(saved + chunk * K * V, tl.trans(arriving), c, V, columns, 1, K, V)
        exact = tl.max(strong, 0) != 0
        if PAIRS or exact:
            square = pairs + chunk * CHUNK * CHUNK
            a = tl.load(square + (j * CHUNK + i if REVERSE else i * CHUNK + j)).to(tl.float32)
        else:
            a = tl.dot(writer, tl.trans(reader), input_precision=PRECISION)
        if exact:
            state = state * inner[None, :]
        # the other half goes here, and what overflowed in it
        a = tl.where(i <= j if REVERSE else i >= j, a, 0.0).to(DOT)
        result = tl.dot(arriving, tl.trans(reader), input_precision=PRECISION)
        result = tl.dot(value, a, result, input_precision=PRECISION)
        store_tile(out + first * out_t, tl.trans(result), rows, out_t, columns, 1, left, V)
        state = tl.dot(value, writer, state, input_precision=PRECISION)
        next_side, inner = chunk_factors(next_total, next_strong)
        state = state * (side * next_side)[None, :]
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
    """dq, dk, dg of ordinary tiles; one program a (chunk, tile of key channels). WIDTH is a row of qe and ke; GIVEN
    says that the pairs' gradient is there, from ``pairs_backward``.

    dg is a suffix sum of q dq - k dk over the very operands, rounded as they are, that entered the products: their
    rounding errors then cancel where the terms do. What spans no gate, a token with itself and the last one on its
    way out of the chunk, stays out of it: it would outweigh all that does where gates are strong.
    """
    tiles: tl.constexpr = WIDTH // BK
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    if tl.load(strongs + chunk * WIDTH + tl.program_id(0) % tiles * BK) != 0:
        return
    b, h, n = place(chunk, chunks, heads)
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
    store_tile(dq + start, dquery * tl.exp2(-down) * scale, rows, dq_t, c, 1, left, K)
    store_tile(dk + start, dkey * tl.exp2(down), rows, dq_t, c, 1, left, K)
    store_tile(dg + start, dgate, rows, dq_t, c, 1, left, K)


@triton.jit(do_not_specialize=_RUNTIME)
def strong_operands_backward(
    q, k, v, g, do, given, totals, strongs, weights, entering, leaving, dq, dk, dg, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
    do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
    tokens, chunks, heads, all_chunks, count,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of strong tiles: as ``chunk_pairs`` splits them. Between halves dg sums just those pairs that span a
    gate. One program ``count`` chunks, at most CHUNKS, of one tile of key channels."""
    tiles: tl.constexpr = WIDTH // BK
    start = (tl.program_id(0) // tiles).to(tl.int64) * count
    end = tl.minimum(start + count, all_chunks)
    if not _any_strong(strongs, start, end, WIDTH, CHUNKS):
        return
    channel = tl.program_id(0) % tiles * BK
    c = channel + tl.arange(0, BK)
    for chunk in range(start, end):
        base = tl.load(strongs + chunk * WIDTH + channel).to(tl.int32) - 1
        if base >= 0:
            _strong_chunk(
                q, k, v, g, do, given, totals, base, weights, entering, leaving, dq, dk, dg, scale,
                q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
                do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
                chunk, c, tokens, chunks, heads,
                K, V, WIDTH, BK, BV, CHUNK, LEVELS, GIVEN, DOT, PRECISION,
            )  # fmt: skip


@triton.jit
def _strong_chunk(
    q, k, v, g, do, given, totals, base, weights, entering, leaving, dq, dk, dg, scale,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
    do_b, do_t, do_h, do_c, dq_b, dq_t, dq_h,
    chunk, c, tokens, chunks, heads,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, GIVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, n = place(chunk, chunks, heads)
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
    i, j = rows[:, None], rows[None, :]
    dpairs *= scale
    itself = tl.sum(tl.where(i == j, dpairs, 0.0), 1)[:, None]
    both = tl.where(i > j, dpairs, tl.trans(dpairs)).to(DOT)
    query = tile(q, rows, q_t, c, q_c, left, K).to(tl.float32)
    key = tile(k, rows, k_t, c, k_c, left, K).to(tl.float32)
    gate = gate_tile(g, rows, g_t, c, g_c, left, K)
    upto = _weights(weights, 2 * LEVELS + 1, rows, CHUNK)
    dquery *= tl.exp2(selected_sums(upto, gate, DOT, PRECISION)) * scale
    dgate = tl.dot(tl.trans(upto.to(DOT)), (query * dquery).to(DOT), input_precision=PRECISION)
    after = _weights(weights, 2 * LEVELS + 2, rows, CHUNK)
    dkey *= tl.exp2(selected_sums(after, gate, DOT, PRECISION))
    dgate = tl.dot(tl.trans(after.to(DOT)), (key * dkey).to(DOT), dgate, input_precision=PRECISION)
    dgate += (tl.exp2(tl.load(totals + chunk * WIDTH + c)) * through)[None, :]
    dquery += itself * key
    dkey += itself * query
    for level in range(base, LEVELS):
        to_middle = _weights(weights, level, rows, CHUNK)
        right = ((i >> level) & 1) == 1
        decay = tl.exp2(selected_sums(to_middle, gate, DOT, PRECISION))
        x = tl.where(right, query, key)
        dx = tl.dot(
            tl.where(_across(i, j, level), both, 0.0).to(DOT), (x * decay).to(DOT), input_precision=PRECISION
        )
        dx *= decay
        dgate = tl.dot(tl.trans(to_middle.to(DOT)), (x * dx).to(DOT), dgate, input_precision=PRECISION)
        dquery += tl.where(right, dx, 0.0)
        dkey += tl.where(right, 0.0, dx)
    between = _weights(weights, LEVELS + base, rows, CHUNK)
    late, early, since, until = _block(query, key, gate, between, DOT, PRECISION)
    inside = (i >> base) == (j >> base)
    dlate = tl.dot(tl.where(inside & (i > j), both, 0.0).to(DOT), early, input_precision=PRECISION)
    dearly = tl.dot(tl.where(inside & (i < j), both, 0.0).to(DOT), late, input_precision=PRECISION)
    # inside of a block as a suffix sum over the very operands, as in ``operands_backward``
    dexponent = late.to(tl.float32) * dlate - early.to(tl.float32) * dearly
    dgate = selected_sums(tl.trans(between), dexponent, DOT, PRECISION, dgate)
    dquery += dlate * since
    dkey += dearly * until
    start = b * dq_b + h * dq_h + first * dq_t
    store_tile(dq + start, dquery, rows, dq_t, c, 1, left, K)
    store_tile(dk + start, dkey, rows, dq_t, c, 1, left, K)
    store_tile(dg + start, dgate, rows, dq_t, c, 1, left, K)
