"""Differentiable exchanges along the sequence, as ops: what a rewritten node that mixes positions is made of.

Every rank holds one contiguous slice of the sequence, rank 0 the first, all of equal length. Each op here
has an adjoint that is exact for the program that all ranks run together, with the sum over ranks of what
the ranks call ``backward()`` on as the objective. Where the adjoint is an exchange of its own, it is an op
too, whose adjoint is the first one again:

========================  ===================  ========================================================
op                        adjoint              forward
========================  ===================  ========================================================
``halo`` (halo.py)        ``halo_backward``    my slice, with the rows next to it that others hold
``flip_sequence``         ``flip_sequence``    my slice of the flipped sequence (flips.py)
``all_sum``               ``all_sum``          the sum over ranks, everywhere
``all_max``               none                 the maximum over ranks, everywhere
``at_rank``               none                 whether this rank is the owner; no communication
``rows_followed``         none                 which of my rows have others behind them; no communication
``ranks_before``          none                 which ranks' slices come before mine; no communication
``from_rank``             ``sum_to_rank``      the owner's value, everywhere
``gather_sequence``       ``scatter_sum``      all slices, everywhere
``slice_sequence``        ``unslice_sequence`` my slice of what every rank holds in full; no communication
========================  ===================  ========================================================

Contract of all of them: any strides, any device that the group has a backend for; a fresh contiguous
result, also on one rank (``group == ""``), where each means what it would among one rank. Sums of float16
and bfloat16 are made in float32 and rounded once. All ranks must run the same ops in the same order; each
op blocks until this rank's part is done (on CUDA: is enqueued). Raises `NeighbourLost` where a rank is
gone.

``world_size`` of the ops whose result depends on it: give it when the op goes into a graph. It is part of
the graph's text then, and a graph from a cache cannot be taken for one of another number of ranks (the
default 0 looks it up from the group, in the traced shapes as well).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeco_compile.lowering import op_log
from zeco_compile.lowering.agreement import check_lengths
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.exchange_parts import (
    TAGS,
    accumulator,
    check_summable,
    checked_dimension,
    checked_rank,
    checked_world_size,
    fresh_copy,
    fresh_like,
    ordered_sum,
    slice_length,
    swap,
    traced_world_size,
)
from zeco_compile.lowering.groups import ONE_RANK, members

# --- sums and maxima over the ranks -------------------------------------------------------------------------


@torch.library.custom_op("zeco::all_sum", mutates_args=(), tags=TAGS)
def all_sum(x: Tensor, group: str) -> Tensor:
    """The sum of ``x`` over the ranks, equal on every rank; any dtype but bool. Its own adjoint."""
    op_log.record("all_sum")
    check_summable("all_sum", x)
    if group == ONE_RANK:
        return fresh_copy(x)
    communicator = communicator_for(group, x.device)
    total = accumulator(x).to(communicator.device)
    communicator.run("all_sum", lambda link: link.all_reduce(total, "sum"))
    return communicator.from_wire(total, x.device).to(x.dtype)


@all_sum.register_fake
def _(x: Tensor, group: str) -> Tensor:
    check_summable("all_sum", x)
    return fresh_like(x)


def _group_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[-1]


def _all_sum_gradient(ctx: Any, grad: Tensor) -> tuple:
    return all_sum(grad, ctx.group), None


all_sum.register_autograd(_all_sum_gradient, setup_context=_group_context)


@torch.library.custom_op("zeco::all_max", mutates_args=(), tags=TAGS)
def all_max(x: Tensor, group: str) -> Tensor:
    """The elementwise maximum of ``x`` over the ranks, equal on every rank; NaN where any rank has NaN.

    Any real dtype; for bool it is "or". It has no gradient, which ranks with equal maxima would have to
    share: call it on a detached ``x`` (as the shift of a softmax, say).
    """
    op_log.record("all_max")
    if group == ONE_RANK:
        return fresh_copy(x)
    # Gathered and not reduced on the way: the transports' maximum drops NaN, depending on the order.
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    everyone = communicator.run("all_max", lambda link: link.all_gather(mine))
    return communicator.from_wire(everyone.amax(0), x.device)


@all_max.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return fresh_like(x)


# --- which rank this is ---------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::at_rank", mutates_args=())
def at_rank(like: Tensor, owner: int, group: str) -> Tensor:
    """[1], bool, on the device of ``like``: whether this is group rank ``owner``. No communication.

    In a graph it stands for a constant that differs between ranks, so that no compiler can fold it and drop,
    on some ranks only, an exchange that the others wait for.

    Raises `InvalidExchange` for an ``owner`` outside the group.
    """
    op_log.record("at_rank")
    owner = checked_rank("at_rank", owner, group)
    return torch.full((1,), members(group).rank == owner, dtype=torch.bool, device=like.device)


@at_rank.register_fake
def _(like: Tensor, owner: int, group: str) -> Tensor:
    return like.new_empty((1,), dtype=torch.bool)


@torch.library.custom_op("zeco::rows_followed", mutates_args=())
def rows_followed(x: Tensor, dim: int, count: int, group: str) -> Tensor:
    """``[x.shape[dim]]``, bool: whether a row of ``x`` along the sequence has ``count`` rows behind it, on whatever
    rank. No communication. The last ``count`` rows of the whole sequence have not.

    An op for the reason that `at_rank` is one. Raises `InvalidExchange` for a dimension that ``x`` lacks.
    """
    op_log.record("rows_followed")
    length = x.shape[checked_dimension("rows_followed", x, dim)]
    rank, world_size = (0, 1) if group == ONE_RANK else (members(group).rank, members(group).world_size)
    rows = torch.arange(rank * length, (rank + 1) * length, device=x.device)
    return rows < world_size * length - count


@rows_followed.register_fake
def _(x: Tensor, dim: int, count: int, group: str) -> Tensor:
    return x.new_empty((x.shape[dim],), dtype=torch.bool)


@torch.library.custom_op("zeco::ranks_before", mutates_args=())
def ranks_before(like: Tensor, backwards: bool, group: str, world_size: int = 0) -> Tensor:
    """``[world_size]``, bool, on the device of ``like``: whether a rank's slice comes before this rank's; with
    ``backwards`` behind it. No communication. An op for the reason that `at_rank` is one."""
    op_log.record("ranks_before")
    count = checked_world_size("ranks_before", group, world_size)
    rank, every = members(group).rank, torch.arange(count, device=like.device)
    return every > rank if backwards else every < rank


@ranks_before.register_fake
def _(like: Tensor, backwards: bool, group: str, world_size: int = 0) -> Tensor:
    return like.new_empty((traced_world_size("ranks_before", group, world_size),), dtype=torch.bool)


# --- one rank's value ---------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::from_rank", mutates_args=(), tags=TAGS)
def from_rank(x: Tensor, owner: int, group: str) -> Tensor:
    """Group rank ``owner``'s ``x`` on every rank; shape and dtype (any) are equal everywhere.

    Raises `InvalidExchange` for an ``owner`` outside the group.
    """
    op_log.record("from_rank")
    owner = checked_rank("from_rank", owner, group)
    if group == ONE_RANK:
        return fresh_copy(x)
    communicator = communicator_for(group, x.device)
    value = fresh_copy(x) if communicator.wire == "nccl" else communicator.to_wire(x)
    communicator.run("from_rank", lambda link: link.broadcast(value, owner))
    return communicator.from_wire(value, x.device)


@from_rank.register_fake
def _(x: Tensor, owner: int, group: str) -> Tensor:
    return fresh_like(x)


@torch.library.custom_op("zeco::sum_to_rank", mutates_args=(), tags=TAGS)
def sum_to_rank(x: Tensor, owner: int, group: str) -> Tensor:
    """The sum of ``x`` over the ranks on group rank ``owner``, zeros on the others; any dtype but bool.

    Added up in the order of the ranks.
    """
    op_log.record("sum_to_rank")
    check_summable("sum_to_rank", x)
    owner = checked_rank("sum_to_rank", owner, group)
    if group == ONE_RANK:
        return fresh_copy(x)
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    if communicator.rank != owner:
        swap(communicator, "sum_to_rank", [(owner, mine)], [])
        return fresh_like(x).zero_()
    others = [rank for rank in range(communicator.world_size) if rank != owner]
    parts = {rank: torch.empty_like(mine) for rank in others}
    swap(communicator, "sum_to_rank", [], list(parts.items()))
    return communicator.from_wire(ordered_sum({**parts, owner: mine}), x.device)


@sum_to_rank.register_fake
def _(x: Tensor, owner: int, group: str) -> Tensor:
    check_summable("sum_to_rank", x)
    return fresh_like(x)


def _owner_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.owner, ctx.group = inputs


def _from_rank_gradient(ctx: Any, grad: Tensor) -> tuple:
    return sum_to_rank(grad, ctx.owner, ctx.group), None, None


def _sum_to_rank_gradient(ctx: Any, grad: Tensor) -> tuple:
    return from_rank(grad, ctx.owner, ctx.group), None, None


from_rank.register_autograd(_from_rank_gradient, setup_context=_owner_context)
sum_to_rank.register_autograd(_sum_to_rank_gradient, setup_context=_owner_context)


# --- the whole sequence -------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::gather_sequence", mutates_args=(), tags=TAGS)
def gather_sequence(
    x: Tensor, dim: int, group: str, world_size: int = 0, shapes_agree: bool = False
) -> Tensor:
    """All ranks' slices, one after the other in ``dim``, on every rank; any dtype.

    ``shapes_agree`` says that the caller knows the slices to be of equal shape (the backend compares lengths
    once a call); otherwise they are compared here first, and all ranks raise `UnequalShards`.
    """
    op_log.record("gather_sequence")
    dim = checked_dimension("gather_sequence", x, dim)
    checked_world_size("gather_sequence", group, world_size)
    if group == ONE_RANK:
        return fresh_copy(x)
    if not shapes_agree:
        check_lengths(group, tuple(x.shape), key=f"zeco::gather_sequence in dimension {dim} of {x.dtype}")
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    everyone = communicator.run("gather_sequence", lambda link: link.all_gather(mine))
    return communicator.from_wire(torch.cat(everyone.unbind(0), dim), x.device)


@gather_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0, shapes_agree: bool = False) -> Tensor:
    dim = checked_dimension("gather_sequence", x, dim)
    return fresh_like(x, dim, x.shape[dim] * traced_world_size("gather_sequence", group, world_size))


@torch.library.custom_op("zeco::scatter_sum", mutates_args=(), tags=TAGS)
def scatter_sum(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """My slice in ``dim`` of the sum of ``x`` over the ranks (reduce-scatter); any dtype but bool.

    Added up in the order of the ranks. Raises `IndivisibleSequence`.
    """
    op_log.record("scatter_sum")
    check_summable("scatter_sum", x)
    dim = checked_dimension("scatter_sum", x, dim)
    ranks = checked_world_size("scatter_sum", group, world_size)
    length = slice_length(x, dim, ranks)
    if group == ONE_RANK:
        return fresh_copy(x)
    communicator = communicator_for(group, x.device)
    slices = [communicator.to_wire(x.narrow(dim, rank * length, length)) for rank in range(ranks)]
    others = [rank for rank in range(ranks) if rank != communicator.rank]
    parts = {rank: torch.empty_like(slices[rank]) for rank in others}
    swap(communicator, "scatter_sum", [(rank, slices[rank]) for rank in others], list(parts.items()))
    total = ordered_sum({**parts, communicator.rank: slices[communicator.rank]})
    return communicator.from_wire(total, x.device)


@scatter_sum.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    check_summable("scatter_sum", x)
    dim = checked_dimension("scatter_sum", x, dim)
    ranks = traced_world_size("scatter_sum", group, world_size)
    return fresh_like(x, dim, slice_length(x, dim, ranks))


@torch.library.custom_op("zeco::slice_sequence", mutates_args=(), tags=TAGS)
def slice_sequence(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """My slice in ``dim`` of an ``x`` that every rank holds in full; any dtype. Raises `IndivisibleSequence`.

    The gradient is the slice's, in its place, and zeros elsewhere: this rank's part, the sum over ranks is
    the whole.
    """
    op_log.record("slice_sequence")
    dim = checked_dimension("slice_sequence", x, dim)
    ranks = checked_world_size("slice_sequence", group, world_size)
    length = slice_length(x, dim, ranks)
    return fresh_copy(x.narrow(dim, members(group).rank * length, length))


@slice_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    dim = checked_dimension("slice_sequence", x, dim)
    ranks = traced_world_size("slice_sequence", group, world_size)
    return fresh_like(x, dim, slice_length(x, dim, ranks))


@torch.library.custom_op("zeco::unslice_sequence", mutates_args=(), tags=TAGS)
def unslice_sequence(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """``x`` in this rank's place of a full sequence of zeros; any dtype. No communication."""
    op_log.record("unslice_sequence")
    dim = checked_dimension("unslice_sequence", x, dim)
    length = x.shape[dim]
    full = fresh_like(x, dim, length * checked_world_size("unslice_sequence", group, world_size)).zero_()
    full.narrow(dim, members(group).rank * length, length).copy_(x)
    return full


@unslice_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    dim = checked_dimension("unslice_sequence", x, dim)
    return fresh_like(x, dim, x.shape[dim] * traced_world_size("unslice_sequence", group, world_size))


def _sequence_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.group, ctx.world_size = inputs[:4]


def _gather_sequence_gradient(ctx: Any, grad: Tensor) -> tuple:
    return scatter_sum(grad, ctx.dim, ctx.group, ctx.world_size), None, None, None, None


def _scatter_sum_gradient(ctx: Any, grad: Tensor) -> tuple:
    # The sums are of equal shape on every rank, since the parts that were sent were.
    return gather_sequence(grad, ctx.dim, ctx.group, ctx.world_size, True), None, None, None


def _slice_sequence_gradient(ctx: Any, grad: Tensor) -> tuple:
    return unslice_sequence(grad, ctx.dim, ctx.group, ctx.world_size), None, None, None


def _unslice_sequence_gradient(ctx: Any, grad: Tensor) -> tuple:
    return slice_sequence(grad, ctx.dim, ctx.group, ctx.world_size), None, None, None


gather_sequence.register_autograd(_gather_sequence_gradient, setup_context=_sequence_context)
scatter_sum.register_autograd(_scatter_sum_gradient, setup_context=_sequence_context)
slice_sequence.register_autograd(_slice_sequence_gradient, setup_context=_sequence_context)
unslice_sequence.register_autograd(_unslice_sequence_gradient, setup_context=_sequence_context)
