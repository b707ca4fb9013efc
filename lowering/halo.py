"""The rows next to a slice, fetched from the ranks that hold them, and the adjoint: the contract is exchange.py's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeco_compile.lowering import op_log
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.exchange_parts import (
    TAGS,
    InvalidExchange,
    accumulator,
    checked_dimension,
    fresh_copy,
    fresh_like,
    swap,
)
from zeco_compile.lowering.groups import ONE_RANK


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


@torch.library.custom_op("zeco::halo", mutates_args=(), tags=TAGS)
def halo(x: Tensor, dim: int, left: int, right: int, fill: float, group: str) -> Tensor:
    """``cat([the last left rows before my shard, x, the first right rows after it], dim)``.

    ``x`` any dtype; the result is longer by ``left + right`` in ``dim``. Rows outside the global sequence are
    ``fill`` (which an integer or boolean ``x`` has to be able to hold). A halo wider than a shard takes rows
    from several ranks. Sends at most ``left + right`` rows. Raises `InvalidExchange`.
    """
    op_log.record("halo")
    dim = checked_dimension("halo", x, dim)
    _check_halo(x, left, right, fill)
    length = x.shape[dim]
    out = fresh_like(x, dim, left + length + right)
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
    swap(communicator, "halo", sends, receives)
    for place, (_, rows) in zip(places, receives, strict=True):
        place.copy_(rows)
    return out


@halo.register_fake
def _(x: Tensor, dim: int, left: int, right: int, fill: float, group: str) -> Tensor:
    dim = checked_dimension("halo", x, dim)
    _check_halo(x, left, right, fill)
    return fresh_like(x, dim, left + x.shape[dim] + right)


@torch.library.custom_op("zeco::halo_backward", mutates_args=(), tags=TAGS)
def halo_backward(grad: Tensor, dim: int, left: int, right: int, group: str) -> Tensor:
    """The adjoint of `halo`: every row's gradient returns to the rank that holds the row, and is added "
    "there."""
    op_log.record("halo_backward")
    dim = checked_dimension("halo_backward", grad, dim)
    length = _inner_length(grad, dim, left, right)
    if group == ONE_RANK or left + right == 0:
        return fresh_copy(grad.narrow(dim, left, length))
    communicator = communicator_for(group, grad.device)
    rank, world_size = communicator.rank, communicator.world_size
    total = accumulator(grad.narrow(dim, left, length))
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
    swap(communicator, "halo reverse", sends, receives)
    for place, (_, rows) in zip(places, receives, strict=True):
        place.add_(communicator.from_wire(rows, grad.device))
    return total.to(grad.dtype)


@halo_backward.register_fake
def _(grad: Tensor, dim: int, left: int, right: int, group: str) -> Tensor:
    dim = checked_dimension("halo_backward", grad, dim)
    return fresh_like(grad, dim, _inner_length(grad, dim, left, right))


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
