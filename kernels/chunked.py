"""Gated linear attention in chunks, on one device: the parts that a sequence split over ranks is made of.

With S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T and o_t = scale * S_t^T q_t, a rank that holds T tokens needs
of the others only the state before its first token, and in the backward the gradient of the state after
its last:

    forward    state, log_decay = rank_state(k, v, g)       S_out = exp(log_decay) S_in + state
               o = diagonal(q, k, v, g, scale)              what the rank alone gives, from a zero state
               o = combine(o, q, g, S_in, scale)            adds what comes through S_in
    backward   dS = rank_dstate(q, g, do, scale)            dS_in = exp(log_decay) dS_out + dS
               d.. = diagonal_backward(q, k, v, g, do, scale)
               d.. = combine_backward(*d.., q, k, v, g, do, scale, S_in, dS_out)

Layout: q, k [B, T, H, K]; v, o, do [B, T, H, V]; g None (no decay), [B, T, H] (a log gate per head and
token) or [B, T, H, K] (per channel); states [B, H, K, V]. Any strides, any T, H, K, V >= 1. Inputs are of any
floating dtype; states, sums and what is handed from one part to the next are float64 where an input is
float64, else float32. Results are fresh contiguous tensors. Log gates are normally <= 0; positive ones are
right too while nothing overflows. A gate of -1e4 or less (so -1e38 and -inf too) is a hard reset: what lies
before it and what lies after it are computed as two separate sequences, forward and backward, and its own
gradient is 0.

The gradients are written by hand: call these functions below autograd. Nothing here waits for the device or
branches on data. Autocast does not reach the products; a TF32 setting of the user's does (never the gates'
sums). Gates enter only as in ``pairs.py``; gradients of gates are sums over what spans the gate, so they are
as accurate as the other gradients, whatever the dtype (which is rounded to once, at the end).

The equations are those of ZeCO (global and local state, All-Scan) and of GLA (chunked form).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from zeco_compile.kernels.chunks import (
    Chunking,
    RunningSum,
    decay_of,
    finite_log_gate,
    sum_after,
    sum_before,
    sum_from,
    sum_to,
)
from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.kernels.pairs import pairs, pairs_backward
from zeco_compile.kernels.shapes import Sizes, check_sizes, check_state, state_dtype

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Gradients(NamedTuple):
    """The gradients of q, k, v and g; dg is None where there is no gate."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None


def _full_precision(kernel: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The kernel with autocast off, which would run its float32 matrix products in half precision."""

    @functools.wraps(kernel)
    def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return kernel(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return kernel(*args, **kwargs)

    return guarded


@_full_precision
def rank_state(k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """What these tokens make of a state: it becomes exp(log_decay) * state_before + state.

    Args:
        k, v, g: see the module.

    Returns:
        state [B, H, K, V], log_decay [B, H, K], or [B, H, 1] for a gate per head and (zeros) for none; both
        in the state dtype. log_decay is finite: hard resets count as -1e4, whose exponential is 0.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(None, k, v, g)
    dtype = state_dtype(k, v, g)
    if g is None:
        log_decay = k.new_zeros((sizes.batch, sizes.heads, 1), dtype=dtype)
    else:
        log_decay = finite_log_gate(g, dtype).sum(1).contiguous()
    return _outer(_until_end(k, g, sizes, dtype), v.to(dtype)), log_decay


@_full_precision
def diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float) -> Tensor:
    """What these tokens give by themselves, from a zero state: o [B, T, H, V] in the state dtype.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, k, v, g)
    dtype = state_dtype(q, k, v, g)
    cut = Chunking.of(sizes, q.device)
    qc, kc, vc, gc = _chunked(cut, dtype, q, k, v, g)
    qc *= scale
    states = _states_before(cut, kc, vc, gc)
    o = torch.empty_like(vc)
    for rows in cut.slices(max(sizes.key, sizes.value), q.device):
        gate = None if gc is None else gc[rows]
        query = qc[rows] if gate is None else qc[rows] * decay_of(sum_to(gate, 1))
        torch.bmm(pairs(qc[rows], kc[rows], gate), vc[rows], out=o[rows])
        o[rows].baddbmm_(query, states[rows])
    return cut.join(o)


@_full_precision
def combine(
    o: Tensor,
    q: Tensor,
    g: Tensor | None,
    state_in: Tensor,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """o + scale * (q * decay since the first token)^T state_in: the whole output.

    Args:
        o: [B, T, H, V], from ``diagonal``.
        q, g, scale: as given to ``diagonal``.
        state_in: [B, H, K, V], the state before the first token.
        out_dtype: of the result; None is q's.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, None, o, g)
    check_state("state_in", state_in, sizes)
    dtype = state_dtype(o, q, g, state_in)
    query = _since_start(q, g, sizes, dtype).mul_(scale)
    added = torch.matmul(query.transpose(1, 2), state_in.to(dtype)).transpose(1, 2)
    return _fresh_sum(o, added, q.dtype if out_dtype is None else out_dtype)


@_full_precision
def rank_dstate(q: Tensor, g: Tensor | None, do: Tensor, scale: float) -> Tensor:
    """The gradient that these tokens' outputs give the state before the first of them: [B, H, K, V].

    It does not hold what comes through the state after the last token; dS_in = exp(log_decay) dS_out + this.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, None, do, g)
    dtype = state_dtype(q, g, do)
    return _outer(_since_start(q, g, sizes, dtype).mul_(scale), do.to(dtype))


@_full_precision
def diagonal_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, scale: float
) -> Gradients:
    """The gradients of ``diagonal``, in the state dtype, for ``combine_backward`` to complete.

    Args:
        q, k, v, g, scale: as given to ``diagonal``.
        do: [B, T, H, V], the gradient of o.

    Returns:
        dq, dk [B, T, H, K], dv [B, T, H, V], dg shaped like g.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, k, v, g)
    _check_do(do, v)
    dtype = state_dtype(q, k, v, g, do)
    cut = Chunking.of(sizes, q.device)
    qc, kc, vc, gc = _chunked(cut, dtype, q, k, v, g)
    qc *= scale
    doc = cut.split(do, dtype)
    states = _states_before(cut, kc, vc, gc)
    dstates = _dstates_after(cut, qc, doc, gc)
    dq, dk, dv = torch.empty_like(qc), torch.empty_like(kc), torch.empty_like(vc)
    dg = None if gc is None else torch.empty_like(gc)
    for rows in cut.slices(max(sizes.key, sizes.value), q.device):
        gate = None if gc is None else gc[rows]
        part = _chunk_backward(qc[rows], kc[rows], vc[rows], gate, doc[rows], states[rows], dstates[rows])
        dq[rows], dk[rows], dv[rows] = part.dq, part.dk, part.dv
        if dg is not None and part.dg is not None:
            dg[rows] = part.dg
    dq *= scale
    dgate = None if g is None or dg is None else _like_gate(cut.join(dg), g)
    return Gradients(cut.join(dq), cut.join(dk), cut.join(dv), dgate)


@_full_precision
def combine_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    state_in: Tensor | None,
    dstate_out: Tensor | None,
) -> Gradients:
    """The whole gradients: those of ``diagonal_backward`` and what goes through the states at both ends.

    Args:
        dq, dk, dv, dg: from ``diagonal_backward``.
        q, k, v, g, do, scale: as given to it.
        state_in: [B, H, K, V], the state before the first token; None is zero.
        dstate_out: [B, H, K, V], the gradient of the state after the last token, from all that uses it; None
            is zero.

    Returns:
        dq, dk, dv, dg in the dtypes of q, k, v, g. The gradient of state_in itself is
        exp(log_decay) * dstate_out + rank_dstate(q, g, do, scale).

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, k, v, g)
    _check_do(do, v)
    for name, boundary in (("state_in", state_in), ("dstate_out", dstate_out)):
        if boundary is not None:
            check_state(name, boundary, sizes)
    dtype = state_dtype(q, k, v, g, do, state_in, dstate_out)
    state = None if state_in is None else state_in.to(dtype)
    dstate = None if dstate_out is None else dstate_out.to(dtype)
    cut = Chunking.of(sizes, q.device)
    # What spans gate t: outputs from t on that read state_in, keys before t that reach the state after the
    # last token, and the one state's way to the other. In this dtype, [B, T, H, channels of the gate].
    spans: list[Tensor] = []
    dq_state = dk_state = dv_state = None
    if state is not None:
        dq_state = torch.matmul(do.to(dtype).transpose(1, 2), state.mT).transpose(1, 2) * scale
        if g is not None:
            dq_state = dq_state * _decay(g, sum_to, sizes, dtype)
            spans.append(cut.running_sum(_per_gate(dq_state * q, sizes), sum_from))
    if dstate is not None:
        dk_state = torch.matmul(v.to(dtype).transpose(1, 2), dstate.mT).transpose(1, 2)
        key = k.to(dtype)
        if g is not None:
            until = _decay(g, sum_after, sizes, dtype)
            key, dk_state = key * until, dk_state * until
            spans.append(cut.running_sum(_per_gate(dk_state * k, sizes), sum_before))
        dv_state = torch.matmul(key.transpose(1, 2), dstate).transpose(1, 2)
    if state is not None and dstate is not None and g is not None:
        through = _per_gate((state * dstate).sum(-1), sizes)
        spans.append((decay_of(finite_log_gate(g, dtype).sum(1)) * through).unsqueeze(1))
    dgate = None
    if g is not None and dg is not None:
        dgate = _fresh_sum(dg, _like_gate(sum(spans[1:], spans[0]), g) if spans else None, g.dtype)
    return Gradients(
        _fresh_sum(dq, dq_state, q.dtype),
        _fresh_sum(dk, dk_state, k.dtype),
        _fresh_sum(dv, dv_state, v.dtype),
        dgate,
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    state_in: Tensor | None = None,
    dstate_out: Tensor | None = None,
) -> Gradients:
    """``diagonal_backward`` and ``combine_backward`` in one: the gradients of q, k, v, g in their dtypes."""
    part = diagonal_backward(q, k, v, g, do, scale)
    return combine_backward(*part, q, k, v, g, do, scale, state_in, dstate_out)


def _fresh_sum(x: Tensor, y: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x + y (None: 0) as a contiguous tensor that shares memory with neither."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return out.copy_(x) if y is None else torch.add(x, y, out=out)


def _like_gate(dgate: Tensor, g: Tensor) -> Tensor:
    """[B, T, H, 1 or K] -> the shape of g."""
    return dgate.squeeze(-1) if g.dim() == 3 else dgate


def _check_do(do: Tensor, v: Tensor) -> None:
    if do.shape != v.shape or not do.dtype.is_floating_point:
        raise InvalidShapes(
            f"do has shape {list(do.shape)} and dtype {do.dtype}; pass a floating-point tensor of v's shape "
            f"{list(v.shape)}."
        )


def _per_gate(x: Tensor, sizes: Sizes) -> Tensor:
    """[.., K] -> [.., channels of the gate]."""
    return x.sum(-1, keepdim=True) if sizes.gate == 1 else x


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """sum over tokens of k_t v_t^T: [B, T, H, K], [B, T, H, V] -> [B, H, K, V]."""
    return torch.matmul(k.permute(0, 2, 3, 1), v.transpose(1, 2))


def _decay(g: Tensor, kind: RunningSum, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """exp of the running sum of g over the whole sequence: [B, T, H, 1 or K]."""
    return decay_of(Chunking.of(sizes, g.device).running_sum(finite_log_gate(g, dtype), kind))


def _since_start(q: Tensor, g: Tensor | None, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """q times the decay from the first token to its own, its own included; fresh."""
    return q.to(dtype, copy=True) if g is None else _decay(g, sum_to, sizes, dtype) * q


def _until_end(k: Tensor, g: Tensor | None, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """k times the decay after its own token to the last."""
    return k.to(dtype) if g is None else _decay(g, sum_after, sizes, dtype) * k


def _chunked(
    cut: Chunking, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    gate = None if g is None else cut.split(finite_log_gate(g, dtype), dtype)
    return cut.split(q, dtype), cut.split(k, dtype), cut.split(v, dtype), gate


def _total_decay(gate: Tensor | None) -> Tensor | None:
    """exp of each chunk's sum, [rows, K or 1, 1]."""
    return None if gate is None else decay_of(gate.sum(1)).unsqueeze(-1)


def _states_before(cut: Chunking, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
    """The state before each chunk, [rows, K, V], from a zero state."""
    key = k if gate is None else k * decay_of(sum_after(gate, 1))
    return cut.scan(key.mT @ v, _total_decay(gate))


def _dstates_after(cut: Chunking, q: Tensor, do: Tensor, gate: Tensor | None) -> Tensor:
    """The gradient of the state after each chunk, [rows, K, V], from later chunks; q holds the scale."""
    query = q if gate is None else q * decay_of(sum_to(gate, 1))
    return cut.scan(query.mT @ do, _total_decay(gate), reverse=True)


def _chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, do: Tensor, state: Tensor, dstate: Tensor
) -> Gradients:
    """The gradients of independent chunks [n, C, ..], each with the state before it and the gradient of the
    state after it [n, K, V]; q holds the scale, and dq is of that q."""
    inside = pairs_backward((do @ v.mT).tril_(), q, k, gate)
    dq_state, dk_state = do @ state.mT, v @ dstate.mT
    dv = inside.pairs.mT @ do
    if gate is None or inside.dg is None:
        return Gradients(inside.dq + dq_state, inside.dk + dk_state, dv.baddbmm_(k, dstate), None)
    since, until = decay_of(sum_to(gate, 1)), decay_of(sum_after(gate, 1))
    dq_state *= since
    dk_state *= until
    dv.baddbmm_(k * until, dstate)
    dquery, dkey = q * dq_state, k * dk_state
    through = (state * dstate).sum(-1)
    if gate.shape[2] == 1:
        dquery, dkey, through = (x.sum(-1, keepdim=True) for x in (dquery, dkey, through))
    # What spans gate t: outputs from t on reading the state before the chunk, keys before t that reach the
    # state after it, and the one state's way to the other.
    dg = inside.dg + sum_from(dquery, 1) + sum_before(dkey, 1)
    dg += (decay_of(gate.sum(1)) * through).unsqueeze(1)
    return Gradients(inside.dq + dq_state, inside.dk + dk_state, dv, dg)
