"""Gated linear attention in Triton kernels as custom ops: the roles of ``attention.py``'s six, for CUDA devices.

    attention.py                          here
    rank_state, diagonal, combine         prepare, chunk_pairs, read_out
    rank_dstate, diagonal_backward,       prepare_backward, chunk_pairs_backward, read_out_backward
        combine_backward

Here a part hands on what it made, so that the next does not make it again: ``kept``, ``saved``, ``dkept`` are lists of
tensors that only these ops read (``kernels/fused.py`` says what is in them). ``everywhere`` is True where a scan is
in flight: the attention matrices inside of chunks are then the work that it runs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zeco_compile.kernels.shapes import state_dtype
from zeco_compile.lowering import op_log
from zeco_compile.lowering.registry import LOCAL_TAGS, define


def _part(name: str, role: str) -> Callable[..., Any]:
    """The part of ``kernels/fused.py`` of this name, noted in the log as what it does. It is imported when the op first
    runs: Triton is needed for nothing else, and looks for a device."""

    def run(*args: Any) -> Any:
        from zeco_compile.kernels import fused

        op_log.record(role)
        return getattr(fused, name)(*args)

    return run


def _read_out_backward(*args: Any) -> tuple[Tensor, ...]:
    dq, dk, dv, dg = _part("read_out_backward", "combine_backward")(*args)
    # an op cannot return None
    return dq, dk, dv, dq.new_empty((0,)) if dg is None else dg


def _prepare_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, whole: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    from zeco_compile.kernels import fused

    batch, _, heads, key = q.shape
    dtype = state_dtype(q, k, v, g)
    decay_shape = (batch, heads, key if g is not None and g.dim() == 4 else 1)
    state = q.new_empty((batch, heads, key, v.shape[3]) if whole else (0,), dtype=dtype)
    log_decay = q.new_empty(decay_shape if whole else (0,), dtype=dtype)
    return state, log_decay, fused.empty_kept(q, k, v, g)


def _chunk_pairs_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, kept: list[Tensor], everywhere: bool
) -> Tensor:
    from zeco_compile.kernels import fused

    return fused.empty_pairs(q, k, v, g, everywhere)


def _read_out_fake(
    pairs: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state_in: Tensor | None,
    scale: float,
    everywhere: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    from zeco_compile.kernels import fused

    return q.new_empty(v.shape), fused.empty_saved(q, k, v, g, save)


def _prepare_backward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    kept: list[Tensor],
    whole: bool,
) -> tuple[Tensor, list[Tensor]]:
    from zeco_compile.kernels import fused

    batch, _, heads, key = q.shape
    shape = (batch, heads, key, v.shape[3]) if whole else (0,)
    dstate = q.new_empty(shape, dtype=state_dtype(q, k, v, g))
    return dstate, fused.empty_dkept(q, k, v, g)


def _chunk_pairs_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, everywhere: bool
) -> Tensor:
    from zeco_compile.kernels import fused

    return fused.empty_dpairs(q, k, v, everywhere)


def _read_out_backward_fake(
    pairs: Tensor,
    dpairs: Tensor,
    kept: list[Tensor],
    saved: Tensor,
    dkept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    dstate_out: Tensor | None,
    everywhere: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dg = q.new_empty((0,)) if g is None else g.new_empty(g.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg


_QKVG = "Tensor q, Tensor k, Tensor v, Tensor? g"

define(
    f"prepare({_QKVG}, float scale, bool whole) -> (Tensor state, Tensor log_decay, Tensor[] kept)",
    _part("prepare", "rank_state"),
    _prepare_fake,
    LOCAL_TAGS,
)
define(
    f"chunk_pairs({_QKVG}, float scale, Tensor[] kept, bool everywhere) -> Tensor",
    _part("chunk_pairs", "diagonal"),
    _chunk_pairs_fake,
    LOCAL_TAGS,
)
define(
    f"read_out(Tensor pairs, Tensor[] kept, {_QKVG}, Tensor? state_in, float scale, bool everywhere, bool save) "
    "-> (Tensor o, Tensor saved)",
    _part("read_out", "combine"),
    _read_out_fake,
    LOCAL_TAGS,
)
define(
    f"prepare_backward({_QKVG}, Tensor do, float scale, Tensor[] kept, bool whole) "
    "-> (Tensor dstate, Tensor[] dkept)",
    _part("prepare_backward", "rank_dstate"),
    _prepare_backward_fake,
    LOCAL_TAGS,
)
define(
    f"chunk_pairs_backward({_QKVG}, Tensor do, bool everywhere) -> Tensor",
    _part("chunk_pairs_backward", "diagonal_backward"),
    _chunk_pairs_backward_fake,
    LOCAL_TAGS,
)
define(
    f"read_out_backward(Tensor pairs, Tensor dpairs, Tensor[] kept, Tensor saved, Tensor[] dkept, {_QKVG}, Tensor do, "
    "float scale, Tensor? dstate_out, bool everywhere) -> (Tensor, Tensor, Tensor, Tensor)",
    _read_out_backward,
    _read_out_backward_fake,
    LOCAL_TAGS,
)
