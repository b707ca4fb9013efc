"""Gated linear attention in Triton kernels, for CUDA devices: what ``chunked.py`` computes, in six parts.

One rank's tokens are cut into chunks of 64, and the chunks into segments, as many as fill the device; a program goes
through one segment of one head with the state in registers. Between segments runs the scan that runs between ranks
too. The state that comes from the other ranks enters where a program begins its segment, so that it costs no pass over
the tokens, nor over the segments.

    prepare              q, k, v, g -> the state before each segment, and what else the parts go on from (``kept``)
    chunk_pairs          the attention matrices inside of chunks: the work that needs no other rank's state
    read_out             -> o; in training also the state before each chunk
    prepare_backward     q, do -> the gradient of the state after each segment
    chunk_pairs_backward the gradients of those matrices
    read_out_backward    -> dv and the gradient of the state after each chunk; then, all chunks side by side, dq, dk, dg

These kernels are bound by the bytes they move and by the instructions that move them. A gate per channel is worth two
scaled operands, written once in the products' dtype and read by every later part (``triton_channel.py``); a gate per
head, or none, is not (``triton_head.py``). The matrices inside of chunks are made where they are needed, and are in
memory only on request (``everywhere``), or where a gate is too strong for the operands.

Products are in bf16 where q, k and v are bf16; else in three tf32 products, as accurate as float32 (fp16 has not the
range that the operands need). States and sums are
float32. Nothing waits for the device or depends on values from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from zeco_compile.kernels import triton_channel as channel
from zeco_compile.kernels import triton_head as head
from zeco_compile.kernels.fused_buffers import (
    empty_dkept,
    empty_dpairs,
    empty_kept,
    empty_pairs,
    empty_saved,
    per_channel,
)
from zeco_compile.kernels.plans import (
    BLOCK_LIMITS,
    CHUNK,
    GROUP,
    LEVELS,
    Plan,
    cdiv,
    plan_for,
    power_of_2,
)
from zeco_compile.kernels.shapes import check_state
from zeco_compile.kernels.triton_shared import pairs_backward, scan_segments

# ----- forward

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _on_its_device(part: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """With the tensors' device as the current one: that is where Triton starts a kernel, whatever it is given."""

    @functools.wraps(part)
    def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        first = args[0]
        assert isinstance(first, Tensor)
        device = first.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return part(*args, **kwargs)
        with torch.cuda.device(device):
            return part(*args, **kwargs)

    return guarded


def _strides(x: Tensor | None, dims: int = 4) -> tuple[int, ...]:
    return (0,) * dims if x is None else tuple(x.stride()[:dims])


def _sums(kept: list[Tensor]) -> list[Tensor | None]:
    """What is kept of a gate per head, see ``empty_kept``; of none there is nothing."""
    return list(kept[:4]) if len(kept) > 2 else [None] * 4


def _scan(
    plan: Plan, states: Tensor, decays: Tensor, before: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Makes of what each segment made the state at its beginning (reverse: end), and ``before``; -> the state after all
    of them, and the decay of all."""
    sizes = plan.sizes
    end = states.new_empty((sizes.batch, sizes.heads, sizes.key, sizes.value))
    width = decays.shape[2]
    whole = states.new_empty((sizes.batch, sizes.heads, width))
    rows, columns = min(plan.width, 32), min(64, power_of_2(sizes.value))
    grid = (plan.rows, cdiv(sizes.key, rows), cdiv(sizes.value, columns))
    plan.start(
        scan_segments, grid,
        (states, decays, before, end, whole), (plan.segments,),
        K=sizes.key, V=sizes.value, WIDTH=width, BK=rows, BV=columns, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return end, whole


@_on_its_device
def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, whole: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What these tokens make of a state, as ``chunked.rank_state``, if the ``whole`` is wanted and not only what each
    segment makes (else both are empty); and ``kept``, see ``empty_kept``."""
    plan = plan_for(q, k, v, g)
    kept = empty_kept(q, k, v, g)
    states, before = kept[-2:]
    decays = torch.empty_like(before)
    if per_channel(g):
        queries, keys, totals, strong, weights = kept[:5]
        plan.start(
            channel.operands, plan.by_chunk("operands"),
            (q, k, g, queries, keys, totals, strong, weights),
            (scale, *_strides(q), *_strides(k), *_strides(g), *plan.all_chunks()),
            **plan.tiles("operands", "K", "BK"), WIDTH=plan.width, LEVELS=LEVELS, LIMIT=plan.limit,
            BLOCK_LIMIT=BLOCK_LIMITS[plan.limit],
        )  # fmt: skip
        _channel_states(plan, keys, v, totals, strong, states, decays, reverse=False)
    else:
        if g is not None:
            to, after, totals, strong = kept[:4]
            plan.start(
                head.gate_sums, (plan.rows, cdiv(plan.chunks, 16)),
                (g, to, after, totals, strong), (*_strides(g, 3), *plan.all_chunks()),
                CHUNKS=16, CHUNK=CHUNK, LIMIT=plan.limit, num_warps=4,
            )  # fmt: skip
        _head_states(plan, k, v, kept, states, decays, 1.0, reverse=False)
    state, log_decay = _scan(plan, states, decays, before, reverse=False)
    if not whole:
        return q.new_empty((0,), dtype=torch.float32), q.new_empty((0,), dtype=torch.float32), kept
    return state, log_decay, kept


def _channel_states(
    plan: Plan,
    operand: Tensor,
    values: Tensor,
    totals: Tensor,
    strong: Tensor,
    states: Tensor,
    decays: Tensor,
    *,
    reverse: bool,
) -> None:
    plan.start(
        channel.segment_states, plan.by_segment("segment_states"),
        (operand, values, totals, strong, states, decays), (*_strides(values), *plan.tokens()),
        **plan.tiles("segment_states"), REVERSE=reverse,
    )  # fmt: skip


def _head_states(
    plan: Plan,
    operand: Tensor,
    values: Tensor,
    kept: list[Tensor],
    states: Tensor,
    decays: Tensor,
    scale: float,
    *,
    reverse: bool,
) -> None:
    to, after, totals, strong = _sums(kept)
    plan.start(
        head.segment_states, plan.by_segment("segment_states"),
        (operand, values, to if reverse else after, totals, strong, states, decays),
        (scale, *_strides(operand), *_strides(values), *plan.tokens()),
        **plan.tiles("segment_states"), REVERSE=reverse, GATED=totals is not None,
    )  # fmt: skip


@_on_its_device
def chunk_pairs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, kept: list[Tensor], everywhere: bool
) -> Tensor:
    """The attention matrices, see ``empty_pairs``: of all chunks, or of those with strong gates only."""
    pairs = empty_pairs(q, k, v, g, everywhere)
    plan = plan_for(q, k, v, g)
    if per_channel(g):
        grid, count = plan.by_group("chunk_pairs")
        plan.start(
            channel.chunk_pairs, grid,
            (q, k, g, *kept[:2], *kept[3:5], pairs),
            (scale, *_strides(q), *_strides(k), *_strides(g), *plan.all_chunks(), plan.every_chunk, count),
            **plan.tiles("chunk_pairs", "K", "BK"), WIDTH=plan.width, CHUNKS=GROUP, LEVELS=LEVELS, ALL=everywhere,
        )  # fmt: skip
    elif everywhere or g is not None:
        to, _, _, strong = _sums(kept)
        grid, count = plan.by_group("chunk_pairs")
        plan.start(
            head.chunk_pairs, grid,
            (q, k, g, to, strong, pairs),
            (*_strides(q), *_strides(k), *_strides(g, 3), *plan.all_chunks(), plan.every_chunk, count),
            **plan.tiles("chunk_pairs", "K", "BK"), CHUNKS=GROUP, ALL=everywhere, GATED=g is not None,
        )  # fmt: skip
    return pairs


@_on_its_device
def read_out(
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
    """o [B, T, H, V] in q's dtype; with ``save`` the state before each chunk, else nothing."""
    plan = plan_for(q, k, v, g)
    if state_in is not None:
        check_state("state_in", state_in, plan.sizes)
    o = q.new_empty(v.shape)
    saved = empty_saved(q, k, v, g, save)
    _read(
        plan,
        q,
        k,
        v,
        g,
        pairs,
        kept,
        kept[-2:],
        state_in,
        o,
        saved,
        scale,
        reverse=False,
        pairs_given=everywhere,
    )
    return o, saved


def _read(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    g: Tensor | None,
    pairs: Tensor,
    kept: list[Tensor],
    segments: list[Tensor],
    entering: Tensor | None,
    out: Tensor,
    saved: Tensor,
    scale: float,
    *,
    reverse: bool,
    pairs_given: bool,
) -> None:
    """o from values v; reverse: dv from the gradient of o."""
    how = {
        "REVERSE": reverse,
        "SAVE": saved.numel() > 0,
        "PAIRS": pairs_given,
        "ENTERING": entering is not None,
    }
    by_channel = "read_out_of_pairs" if pairs_given else "read_out"
    name = by_channel if per_channel(g) else "read_out_per_head"
    how |= plan.tiles(name)
    if entering is not None:
        entering = entering.contiguous()
    if per_channel(g):
        queries, keys, totals, strong = kept[:4]
        reader, writer = (keys, queries) if reverse else (queries, keys)
        plan.start(
            channel.read_out, plan.by_segment(name),
            (reader, writer, values, totals, strong, pairs, *segments, entering, out, saved),
            (*_strides(values), *_strides(out, 3), *plan.tokens()), **how,
        )  # fmt: skip
        return
    reader, writer = (k, q) if reverse else (q, k)
    plan.start(
        head.read_out, plan.by_segment(name),
        (reader, writer, values, *_sums(kept), pairs, *segments, entering, out, saved),
        (scale, *_strides(reader), *_strides(writer), *_strides(values), *_strides(out, 3), *plan.tokens()),
        **how, GATED=g is not None,
    )  # fmt: skip


# ----- backward


@_on_its_device
def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    kept: list[Tensor],
    whole: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The gradient that these tokens' outputs give the state before them, as ``chunked.rank_dstate``, if the ``whole``
    is wanted (else it is empty); and what ``read_out_backward`` goes on from, see ``empty_dkept``."""
    plan = plan_for(q, k, v, g)
    states, before = dkept = empty_dkept(q, k, v, g)
    decays = torch.empty_like(before)
    if per_channel(g):
        queries, _, totals, strong = kept[:4]
        _channel_states(plan, queries, do, totals, strong, states, decays, reverse=True)
    else:
        _head_states(plan, q, do, kept, states, decays, scale, reverse=True)
    dstate, _ = _scan(plan, states, decays, before, reverse=True)
    return dstate if whole else q.new_empty((0,), dtype=torch.float32), dkept


@_on_its_device
def chunk_pairs_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, everywhere: bool
) -> Tensor:
    """The gradients of all chunks' attention matrices [B*H, chunks, 64, 64]; nothing unless ``everywhere``."""
    dpairs = empty_dpairs(q, k, v, everywhere)
    if everywhere:
        plan = plan_for(q, k, v, g)
        plan.start(
            pairs_backward, (plan.every_chunk,),
            (v, do, dpairs), (*_strides(v), *_strides(do), *plan.all_chunks()),
            **plan.tiles("pairs_backward", "V", "BV"),
        )  # fmt: skip
    return dpairs


@_on_its_device
def read_out_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dg in the dtypes of q, k, v, g. ``pairs``, ``kept``, ``saved``: from the forward."""
    plan = plan_for(q, k, v, g)
    if dstate_out is not None:
        check_state("dstate_out", dstate_out, plan.sizes)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dg = None if g is None else g.new_empty(g.shape)
    leaving = torch.empty_like(saved)
    _read(
        plan,
        q,
        k,
        do,
        g,
        pairs,
        kept,
        dkept,
        dstate_out,
        dv,
        leaving,
        scale,
        reverse=True,
        pairs_given=everywhere,
    )
    if per_channel(g):
        # Triton 3.6 makes dg wrong for some sizes (K = 17, V = 300) where the tokens of a channel lie side by side
        v, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (v, do))
        g = g if g is None or g.stride(-1) == 1 else g.contiguous()
        queries, keys, totals, strong, weights = kept[:5]
        plan.start(
            channel.operands_backward, plan.by_chunk("operands_backward"),
            (queries, keys, v, g, do, dpairs, totals, strong, saved, leaving, dq, dk, dg),
            (scale, *_strides(v), *_strides(g), *_strides(do), *_strides(dq, 3), *plan.all_chunks()),
            **plan.tiles("operands_backward"), WIDTH=plan.width, GIVEN=everywhere,
        )  # fmt: skip
        grid, count = plan.by_group("strong_operands_backward", tiles=True)
        plan.start(
            channel.strong_operands_backward, grid,
            (q, k, v, g, do, dpairs, totals, strong, weights, saved, leaving, dq, dk, dg),
            (scale, *_strides(q), *_strides(k), *_strides(v), *_strides(g), *_strides(do), *_strides(dq, 3),
             *plan.all_chunks(), plan.every_chunk, count),
            **plan.tiles("strong_operands_backward"), WIDTH=plan.width, CHUNKS=GROUP, LEVELS=LEVELS,
            GIVEN=everywhere,
        )  # fmt: skip
    else:
        plan.start(
            head.operands_backward, (plan.every_chunk,),
            (q, k, v, g, *_sums(kept), do, dpairs, saved, leaving, dq, dk, dg),
            (scale, *_strides(q), *_strides(k), *_strides(v), *_strides(g, 3), *_strides(do), *_strides(dq, 3),
             *_strides(dg, 3), *plan.all_chunks()),
            **plan.tiles("operands_backward"), GIVEN=everywhere, GATED=g is not None,
        )  # fmt: skip
    return dq, dk, dv, dg
