"""What the parts of ``fused.py`` hand on, not yet written; of symbolic sizes too, for the fakes of the ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_compile.kernels.plans import CHUNK, LEVELS, cdiv, most_segments, storage, width_of


def per_channel(g: Tensor | None) -> bool:
    return g is not None and g.dim() == 4


def _segments(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """For each segment the state before it if nothing enters before all, and how much of what does is left there."""
    batch, _, heads, key = q.shape
    rows, value = batch * heads, v.shape[3]
    wide = storage(q, k, v) != torch.bfloat16
    most = most_segments(rows, width_of(key), value, wide, q.device)
    states = q.new_empty((rows, most, key, value), dtype=torch.float32)
    return [states, q.new_empty((rows, most, key if per_channel(g) else 1), dtype=torch.float32)]


def empty_kept(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """Not yet written: by the kind of gate, then the states before segments and what is left there.

    Per channel: the two operands [B*H, chunks * 64, width], each chunk's totals, which channels are strong, and the
    weights of their gates. Per head: the exponents with which each token reads and writes, each chunk's total, and
    which chunks are strong.
    """
    batch, tokens, heads, key = q.shape
    rows, chunks = batch * heads, cdiv(tokens, CHUNK)
    if per_channel(g):
        kept_in = storage(q, k, v)
        operand, total = (rows, chunks * CHUNK, width_of(key)), (rows, chunks, width_of(key))
        operands = [q.new_empty(operand, dtype=kept_in) for _ in range(2)]
        first = [*operands, q.new_empty(total, dtype=torch.float32), q.new_empty(total, dtype=torch.int8)]
        first.append(q.new_empty((2 * LEVELS + 3, CHUNK, CHUNK), dtype=torch.bfloat16))
    elif g is not None:
        sums = [q.new_empty((rows, chunks, CHUNK), dtype=torch.float32) for _ in range(2)]
        each = (rows, chunks)
        first = [*sums, q.new_empty(each, dtype=torch.float32), q.new_empty(each, dtype=torch.int8)]
    else:
        first = []
    return [*first, *_segments(q, k, v, g)]


def empty_dkept(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """Not yet written: the gradients of the states after segments, and what is left there of one that enters."""
    return _segments(q, k, v, g)


def _empty_by_chunk(shape: Sequence[int], q: Tensor, k: Tensor, v: Tensor, wanted: bool) -> Tensor:
    batch, tokens, heads, _ = q.shape
    chunks = cdiv(tokens, CHUNK)
    return q.new_empty((batch * heads, chunks, *shape) if wanted else (0,), dtype=storage(q, k, v))


def empty_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, everywhere: bool) -> Tensor:
    """Not yet written: the attention matrix of each chunk [B*H, chunks, 64, 64], or nothing."""
    return _empty_by_chunk((CHUNK, CHUNK), q, k, v, everywhere or g is not None)


def empty_dpairs(q: Tensor, k: Tensor, v: Tensor, everywhere: bool) -> Tensor:
    """Not yet written: the gradient of each chunk's attention matrix, or nothing."""
    return _empty_by_chunk((CHUNK, CHUNK), q, k, v, everywhere)


def empty_saved(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, save: bool) -> Tensor:
    """Not yet written: each chunk's incoming state, [B*H, chunks, K, V] or, of a gate per head, [B*H, chunks, V, K]
    (each the faster for who reads it); or nothing."""
    state = (q.shape[3], v.shape[3]) if per_channel(g) else (v.shape[3], q.shape[3])
    return _empty_by_chunk(state, q, k, v, save)
