"""Differentiable exchanges along the sequence, as ops: what a rewritten node that mixes positions is made of.

Every rank holds one contiguous slice of the sequence, rank 0 the first, all of equal length. Each op here
has an adjoint that is exact for the program that all ranks run together, with the sum over ranks of what
the ranks call ``backward()`` on as the objective. Where the adjoint is an exchange of its own, it is an op
too, whose adjoint is the first one again:

========================  ===================  ========================================================
op                        adjoint              forward
========================  ===================  ========================================================
``halo``                  ``halo_backward``    my slice, with the rows next to it that others hold
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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering import op_log
from zeco_compile.lowering.agreement import check_lengths
from zeco_compile.lowering.communicator import Communicator, Link, communicator_for, members
from zeco_compile.lowering.groups import ONE_RANK

# A captured CUDA graph would replay the transfers without the other ranks knowing.
_TAGS = (torch.Tag.cudagraph_unsafe,)


class InvalidExchange(ZecoError):
    """An exchange along the sequence was asked for with arguments that have no meaning."""


class IndivisibleSequence(InvalidExchange):
    """A full sequence cannot be cut into equal slices, one for each rank."""


# --- halo ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Rows of a halo that one other rank holds, ``distance`` ranks away, ``rows`` of them.

    ``at`` is where they lie, as rows from the shard's edge outwards to the piece's nearer end.
    """

    distance: int
    rows: int
    at: int


def _pieces(width: int, length: int, world_size: int) -> Iterator[_Piece]:
    """The rows next to a shard, nearest rank first; more than one rank where the halo is wider than a "
    "shard."""
    distance, at = 1, 0
    while at < width and distance < world_size and length > 0:
        rows = min(length, width - at)
        yield _Piece(distance, rows, at)
        distance, at = distance + 1, at + rows


@torch.library.custom_op("zeco::halo", mutates_args=(), tags=_TAGS)
def halo(x: Tensor, dim: int, left: int, right: int, fill: float, group: str) -> Tensor:
    """``cat([the last left rows before my shard, x, the first right rows after it], dim)``.

    ``x`` any dtype; the result is longer by ``left + right`` in ``dim``. Rows outside the global sequence are
    ``fill`` (which an integer or boolean ``x`` has to be able to hold). A halo wider than a shard takes rows
    from several ranks. Sends at most ``left + right`` rows. Raises `InvalidExchange`.
    """
    op_log.record("halo")
    dim = _dimension("halo", x, dim)
    _check_halo(x, left, right, fill)
    length = x.shape[dim]
    out = _fresh_like(x, dim, left + length + right)
    value = _as_dtype(fill, x.dtype)
    out.narrow(dim, 0, left).fill_(value)
    out.narrow(dim, left, length).copy_(x)
    out.narrow(dim, left + length, right).fill_(value)
    if group == ONE_RANK or left + right == 0:
        return out
    communicator = communicator_for(group, x.device)
    rank, world_size = communicator.rank, communicator.world_size
    sends, receives, places = [], [], []

    def received(rows: int, start: int, source: int) -> None:
        shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
        receives.append((source, torch.empty(shape, dtype=x.dtype, device=communicator.device)))
        places.append(out.narrow(dim, start, rows))

    for piece in _pieces(left, length, world_size):
        if rank + piece.distance < world_size:
            rows = x.narrow(dim, length - piece.rows, piece.rows)
            sends.append((rank + piece.distance, communicator.to_wire(rows)))
        if rank - piece.distance >= 0:
            received(piece.rows, left - piece.at - piece.rows, rank - piece.distance)
    for piece in _pieces(right, length, world_size):
        if rank - piece.distance >= 0:
            rows = x.narrow(dim, 0, piece.rows)
            sends.append((rank - piece.distance, communicator.to_wire(rows)))
        if rank + piece.distance < world_size:
            received(piece.rows, left + length + piece.at, rank + piece.distance)
    _swap(communicator, "halo", sends, receives)
    for place, (_, rows) in zip(places, receives, strict=True):
        place.copy_(rows)
    return out


@halo.register_fake
def _(x: Tensor, dim: int, left: int, right: int, fill: float, group: str) -> Tensor:
    dim = _dimension("halo", x, dim)
    _check_halo(x, left, right, fill)
    return _fresh_like(x, dim, left + x.shape[dim] + right)


@torch.library.custom_op("zeco::halo_backward", mutates_args=(), tags=_TAGS)
def halo_backward(grad: Tensor, dim: int, left: int, right: int, group: str) -> Tensor:
    """The adjoint of `halo`: every row's gradient returns to the rank that holds the row, and is added "
    "there."""
    op_log.record("halo_backward")
    dim = _dimension("halo_backward", grad, dim)
    length = _inner_length(grad, dim, left, right)
    if group == ONE_RANK or left + right == 0:
        return _fresh_copy(grad.narrow(dim, left, length))
    communicator = communicator_for(group, grad.device)
    rank, world_size = communicator.rank, communicator.world_size
    total = _accumulator(grad.narrow(dim, left, length))
    sends, receives, places = [], [], []

    def received(rows: int, start: int, source: int) -> None:
        shape = [*grad.shape[:dim], rows, *grad.shape[dim + 1 :]]
        receives.append((source, torch.empty(shape, dtype=grad.dtype, device=communicator.device)))
        places.append(total.narrow(dim, start, rows))

    for piece in _pieces(left, length, world_size):
        if rank - piece.distance >= 0:
            rows = grad.narrow(dim, left - piece.at - piece.rows, piece.rows)
            sends.append((rank - piece.distance, communicator.to_wire(rows)))
        if rank + piece.distance < world_size:
            received(piece.rows, length - piece.rows, rank + piece.distance)
    for piece in _pieces(right, length, world_size):
        if rank + piece.distance < world_size:
            rows = grad.narrow(dim, left + length + piece.at, piece.rows)
            sends.append((rank + piece.distance, communicator.to_wire(rows)))
        if rank - piece.distance >= 0:
            received(piece.rows, 0, rank - piece.distance)
    _swap(communicator, "halo reverse", sends, receives)
    for place, (_, rows) in zip(places, receives, strict=True):
        place.add_(communicator.from_wire(rows, grad.device))
    return total.to(grad.dtype)


@halo_backward.register_fake
def _(grad: Tensor, dim: int, left: int, right: int, group: str) -> Tensor:
    dim = _dimension("halo_backward", grad, dim)
    return _fresh_like(grad, dim, _inner_length(grad, dim, left, right))


def _halo_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.left, ctx.right, _, ctx.group = inputs


def _halo_gradient(ctx: Any, grad: Tensor) -> tuple:
    return halo_backward(grad, ctx.dim, ctx.left, ctx.right, ctx.group), None, None, None, None, None


def _halo_backward_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.left, ctx.right, ctx.group = inputs


def _halo_backward_gradient(ctx: Any, grad: Tensor) -> tuple:
    return halo(grad, ctx.dim, ctx.left, ctx.right, 0.0, ctx.group), None, None, None, None


halo.register_autograd(_halo_gradient, setup_context=_halo_context)
halo_backward.register_autograd(_halo_backward_gradient, setup_context=_halo_backward_context)


# --- sums and maxima over the ranks -------------------------------------------------------------------------


@torch.library.custom_op("zeco::all_sum", mutates_args=(), tags=_TAGS)
def all_sum(x: Tensor, group: str) -> Tensor:
    """The sum of ``x`` over the ranks, equal on every rank; any dtype but bool. Its own adjoint."""
    op_log.record("all_sum")
    _check_summable("all_sum", x)
    if group == ONE_RANK:
        return _fresh_copy(x)
    communicator = communicator_for(group, x.device)
    total = _accumulator(x).to(communicator.device)
    communicator.run("all_sum", lambda link: link.all_reduce(total, "sum"))
    return communicator.from_wire(total, x.device).to(x.dtype)


@all_sum.register_fake
def _(x: Tensor, group: str) -> Tensor:
    _check_summable("all_sum", x)
    return _fresh_like(x)


def _group_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[-1]


def _all_sum_gradient(ctx: Any, grad: Tensor) -> tuple:
    return all_sum(grad, ctx.group), None


all_sum.register_autograd(_all_sum_gradient, setup_context=_group_context)


@torch.library.custom_op("zeco::all_max", mutates_args=(), tags=_TAGS)
def all_max(x: Tensor, group: str) -> Tensor:
    """The elementwise maximum of ``x`` over the ranks, equal on every rank; NaN where any rank has NaN.

    Any real dtype; for bool it is "or". It has no gradient, which ranks with equal maxima would have to
    share: call it on a detached ``x`` (as the shift of a softmax, say).
    """
    op_log.record("all_max")
    if group == ONE_RANK:
        return _fresh_copy(x)
    # Gathered and not reduced on the way: the transports' maximum drops NaN, depending on the order.
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    everyone = communicator.run("all_max", lambda link: link.all_gather(mine))
    return communicator.from_wire(everyone.amax(0), x.device)


@all_max.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return _fresh_like(x)


# --- which rank this is ---------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::at_rank", mutates_args=())
def at_rank(like: Tensor, owner: int, group: str) -> Tensor:
    """[1], bool, on the device of ``like``: whether this is group rank ``owner``. No communication.

    In a graph it stands for a constant that differs between ranks, so that no compiler can fold it and drop,
    on some ranks only, an exchange that the others wait for.

    Raises `InvalidExchange` for an ``owner`` outside the group.
    """
    op_log.record("at_rank")
    owner = _rank_in_group("at_rank", owner, group)
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
    length = x.shape[_dimension("rows_followed", x, dim)]
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
    count = _world_size("ranks_before", group, world_size)
    rank, every = members(group).rank, torch.arange(count, device=like.device)
    return every > rank if backwards else every < rank


@ranks_before.register_fake
def _(like: Tensor, backwards: bool, group: str, world_size: int = 0) -> Tensor:
    return like.new_empty((_traced_world_size("ranks_before", group, world_size),), dtype=torch.bool)


# --- one rank's value ---------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::from_rank", mutates_args=(), tags=_TAGS)
def from_rank(x: Tensor, owner: int, group: str) -> Tensor:
    """Group rank ``owner``'s ``x`` on every rank; shape and dtype (any) are equal everywhere.

    Raises `InvalidExchange` for an ``owner`` outside the group.
    """
    op_log.record("from_rank")
    owner = _rank_in_group("from_rank", owner, group)
    if group == ONE_RANK:
        return _fresh_copy(x)
    communicator = communicator_for(group, x.device)
    value = _fresh_copy(x) if communicator.wire == "nccl" else communicator.to_wire(x)
    communicator.run("from_rank", lambda link: link.broadcast(value, owner))
    return communicator.from_wire(value, x.device)


@from_rank.register_fake
def _(x: Tensor, owner: int, group: str) -> Tensor:
    return _fresh_like(x)


@torch.library.custom_op("zeco::sum_to_rank", mutates_args=(), tags=_TAGS)
def sum_to_rank(x: Tensor, owner: int, group: str) -> Tensor:
    """The sum of ``x`` over the ranks on group rank ``owner``, zeros on the others; any dtype but bool.

    Added up in the order of the ranks.
    """
    op_log.record("sum_to_rank")
    _check_summable("sum_to_rank", x)
    owner = _rank_in_group("sum_to_rank", owner, group)
    if group == ONE_RANK:
        return _fresh_copy(x)
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    if communicator.rank != owner:
        _swap(communicator, "sum_to_rank", [(owner, mine)], [])
        return _fresh_like(x).zero_()
    others = [rank for rank in range(communicator.world_size) if rank != owner]
    parts = {rank: torch.empty_like(mine) for rank in others}
    _swap(communicator, "sum_to_rank", [], list(parts.items()))
    return communicator.from_wire(_ordered_sum({**parts, owner: mine}), x.device)


@sum_to_rank.register_fake
def _(x: Tensor, owner: int, group: str) -> Tensor:
    _check_summable("sum_to_rank", x)
    return _fresh_like(x)


def _owner_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.owner, ctx.group = inputs


def _from_rank_gradient(ctx: Any, grad: Tensor) -> tuple:
    return sum_to_rank(grad, ctx.owner, ctx.group), None, None


def _sum_to_rank_gradient(ctx: Any, grad: Tensor) -> tuple:
    return from_rank(grad, ctx.owner, ctx.group), None, None


from_rank.register_autograd(_from_rank_gradient, setup_context=_owner_context)
sum_to_rank.register_autograd(_sum_to_rank_gradient, setup_context=_owner_context)


# --- the whole sequence -------------------------------------------------------------------------------------


@torch.library.custom_op("zeco::gather_sequence", mutates_args=(), tags=_TAGS)
def gather_sequence(
    x: Tensor, dim: int, group: str, world_size: int = 0, shapes_agree: bool = False
) -> Tensor:
    """All ranks' slices, one after the other in ``dim``, on every rank; any dtype.

    ``shapes_agree`` says that the caller knows the slices to be of equal shape (the backend compares lengths
    once a call); otherwise they are compared here first, and all ranks raise `UnequalShards`.
    """
    op_log.record("gather_sequence")
    dim = _dimension("gather_sequence", x, dim)
    _world_size("gather_sequence", group, world_size)
    if group == ONE_RANK:
        return _fresh_copy(x)
    if not shapes_agree:
        check_lengths(group, tuple(x.shape), key=f"zeco::gather_sequence in dimension {dim} of {x.dtype}")
    communicator = communicator_for(group, x.device)
    mine = communicator.to_wire(x)
    everyone = communicator.run("gather_sequence", lambda link: link.all_gather(mine))
    return communicator.from_wire(torch.cat(everyone.unbind(0), dim), x.device)


@gather_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0, shapes_agree: bool = False) -> Tensor:
    dim = _dimension("gather_sequence", x, dim)
    return _fresh_like(x, dim, x.shape[dim] * _traced_world_size("gather_sequence", group, world_size))


@torch.library.custom_op("zeco::scatter_sum", mutates_args=(), tags=_TAGS)
def scatter_sum(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """My slice in ``dim`` of the sum of ``x`` over the ranks (reduce-scatter); any dtype but bool.

    Added up in the order of the ranks. Raises `IndivisibleSequence`.
    """
    op_log.record("scatter_sum")
    _check_summable("scatter_sum", x)
    dim = _dimension("scatter_sum", x, dim)
    ranks = _world_size("scatter_sum", group, world_size)
    length = _slice_length(x, dim, ranks)
    if group == ONE_RANK:
        return _fresh_copy(x)
    communicator = communicator_for(group, x.device)
    slices = [communicator.to_wire(x.narrow(dim, rank * length, length)) for rank in range(ranks)]
    others = [rank for rank in range(ranks) if rank != communicator.rank]
    parts = {rank: torch.empty_like(slices[rank]) for rank in others}
    _swap(communicator, "scatter_sum", [(rank, slices[rank]) for rank in others], list(parts.items()))
    total = _ordered_sum({**parts, communicator.rank: slices[communicator.rank]})
    return communicator.from_wire(total, x.device)


@scatter_sum.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    _check_summable("scatter_sum", x)
    dim = _dimension("scatter_sum", x, dim)
    ranks = _traced_world_size("scatter_sum", group, world_size)
    return _fresh_like(x, dim, _slice_length(x, dim, ranks))


@torch.library.custom_op("zeco::slice_sequence", mutates_args=(), tags=_TAGS)
def slice_sequence(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """My slice in ``dim`` of an ``x`` that every rank holds in full; any dtype. Raises `IndivisibleSequence`.

    The gradient is the slice's, in its place, and zeros elsewhere: this rank's part, the sum over ranks is
    the whole.
    """
    op_log.record("slice_sequence")
    dim = _dimension("slice_sequence", x, dim)
    ranks = _world_size("slice_sequence", group, world_size)
    length = _slice_length(x, dim, ranks)
    return _fresh_copy(x.narrow(dim, members(group).rank * length, length))


@slice_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    dim = _dimension("slice_sequence", x, dim)
    ranks = _traced_world_size("slice_sequence", group, world_size)
    return _fresh_like(x, dim, _slice_length(x, dim, ranks))


@torch.library.custom_op("zeco::unslice_sequence", mutates_args=(), tags=_TAGS)
def unslice_sequence(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    """``x`` in this rank's place of a full sequence of zeros; any dtype. No communication."""
    op_log.record("unslice_sequence")
    dim = _dimension("unslice_sequence", x, dim)
    length = x.shape[dim]
    full = _fresh_like(x, dim, length * _world_size("unslice_sequence", group, world_size)).zero_()
    full.narrow(dim, members(group).rank * length, length).copy_(x)
    return full


@unslice_sequence.register_fake
def _(x: Tensor, dim: int, group: str, world_size: int = 0) -> Tensor:
    dim = _dimension("unslice_sequence", x, dim)
    return _fresh_like(x, dim, x.shape[dim] * _traced_world_size("unslice_sequence", group, world_size))


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


# --- common parts -------------------------------------------------------------------------------------------


def _swap(
    communicator: Communicator,
    label: str,
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Tensor]],
) -> None:
    """Sends and receives at once, until both are through."""

    def work(link: Link) -> None:
        link.post(sends, receives).wait()
        link.flush()

    communicator.run(label, work)


def _ordered_sum(parts: dict[int, Tensor]) -> Tensor:
    """The sum in the order of the ranks, so that it does not depend on who adds up; in the parts' dtype."""
    total = _accumulator(parts[0])
    for rank in range(1, len(parts)):
        total.add_(parts[rank])
    return total.to(parts[0].dtype)


def _accumulator(x: Tensor) -> Tensor:
    """A fresh contiguous copy to add to, in float32 for the halves and int64 for the small integers.

    (gloo cannot reduce int16 either; the sum of small integers wraps as they do.)
    """
    dtype = _WIDER.get(x.dtype, x.dtype)
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int64,
    torch.uint8: torch.int64,
    torch.int16: torch.int64,
}


def _fresh_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _fresh_like(x: Tensor, dim: int | None = None, size: int = 0) -> Tensor:
    """Contiguous and uninitialised, like ``x`` but for ``size`` in ``dim``."""
    shape = list(x.shape)
    if dim is not None:
        shape[dim] = size
    return x.new_empty(shape)


def _dimension(op: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InvalidExchange(
            f"{op} got dimension {dim} of a tensor with {x.dim()} dimensions (shape {tuple(x.shape)}). "
            "Give the dimension in which the tensor runs along the sequence."
        )
    return dim % x.dim()


def check_dimension(x: Tensor, dim: int) -> None:
    """Raises `InvalidExchange` if ``x`` is no tensor with that dimension."""
    if not isinstance(x, Tensor):
        raise InvalidExchange(f"sequences are tensors, and this is a {type(x).__name__}.")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InvalidExchange(f"a dimension is an int, and this is {dim!r} (a {type(dim).__name__}).")
    _dimension("the sequence's exchange", x, dim)


def check_divisible(x: Tensor, dim: int, world_size: int) -> None:
    """Raises `IndivisibleSequence` if ``x`` cannot be cut into equal slices, and as `check_dimension`."""
    check_dimension(x, dim)
    _slice_length(x, dim, world_size)


def _check_halo(x: Tensor, left: int, right: int, fill: float) -> None:
    if left < 0 or right < 0:
        raise InvalidExchange(
            f"zeco::halo got widths {left} and {right}: they are numbers of rows, 0 or more."
        )
    _as_dtype(fill, x.dtype)


def _as_dtype(fill: float, dtype: torch.dtype) -> float | int | bool:
    """``fill`` as a value that tensors of ``dtype`` hold exactly, where that is a matter of yes or no."""
    if dtype.is_floating_point or dtype.is_complex:
        return fill
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (fill == fill // 1 and low <= fill <= high):
        raise InvalidExchange(f"zeco::halo cannot fill a tensor of {dtype} with {fill}.")
    return bool(fill) if dtype == torch.bool else int(fill)


def _inner_length(grad: Tensor, dim: int, left: int, right: int) -> int:
    length = grad.shape[dim] - left - right
    if length < 0:
        raise InvalidExchange(
            f"zeco::halo_backward got {grad.shape[dim]} rows, fewer than the halo's {left} + {right}."
        )
    return length


def _check_summable(op: str, x: Tensor) -> None:
    if x.dtype == torch.bool:
        raise InvalidExchange(
            f"zeco::{op} got a tensor of torch.bool. Convert it to an integer dtype to count, or use all_max "
            'for "any".'
        )


def _rank_in_group(op: str, owner: int, group: str) -> int:
    world_size = members(group).world_size
    if not 0 <= owner < world_size:
        raise InvalidExchange(f"zeco::{op} got owner {owner} in a group of {world_size} ranks.")
    return owner


def _world_size(op: str, group: str, claimed: int) -> int:
    """The number of ranks; what a graph claims is checked against the group when the op runs."""
    actual = members(group).world_size
    if claimed not in (0, actual):
        raise InvalidExchange(
            f"zeco::{op} stands in a graph that was compiled for {claimed} ranks, and its group has "
            f"{actual}. Compile again (`torch._dynamo.reset()`) after the process group changed."
        )
    return actual


def _traced_world_size(op: str, group: str, claimed: int) -> int:
    """The number of ranks in a trace: what the graph claims. `explain` traces for ranks that are not there."""
    return claimed or _world_size(op, group, claimed)


def _slice_length(x: Tensor, dim: int, world_size: int) -> int:
    if x.shape[dim] % world_size != 0:
        raise IndivisibleSequence(
            f"a sequence of {x.shape[dim]} (dimension {dim} of shape {tuple(x.shape)}) cannot be cut into "
            f"{world_size} slices of equal length. Pad it to a multiple of {world_size}, or use "
            "another number of ranks."
        )
    return x.shape[dim] // world_size
