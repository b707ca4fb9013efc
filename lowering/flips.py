"""A sequence turned around: this rank's slice of it is the slice of the rank as far from the other end, flipped. The
contract is exchange.py's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeco_compile.lowering import op_log
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.exchange_parts import TAGS, checked_dimension, fresh_like, swap
from zeco_compile.lowering.groups import ONE_RANK


@torch.library.custom_op("zeco::flip_sequence", mutates_args=(), tags=TAGS)
def flip_sequence(x: Tensor, dim: int, group: str) -> Tensor:
    """My slice in ``dim`` of the flipped sequence; any dtype. Its own adjoint.

    Ranks r and P - 1 - r send each other one slice; the one in the middle of an odd number sends nothing. Raises
    `InvalidExchange` for a dimension that ``x`` lacks.
    """
    op_log.record("flip_sequence")
    dim = checked_dimension("flip_sequence", x, dim)
    if group == ONE_RANK:
        return x.flip(dim).contiguous()
    communicator = communicator_for(group, x.device)
    opposite = communicator.world_size - 1 - communicator.rank
    mine = communicator.to_wire(x)
    if opposite == communicator.rank:
        theirs = mine
        swap(communicator, "flip", [], [])  # counted as the others count it
    else:
        theirs = torch.empty_like(mine)
        swap(communicator, "flip", [(opposite, mine)], [(opposite, theirs)])
    return communicator.from_wire(theirs.flip(dim), x.device)


@flip_sequence.register_fake
def _(x: Tensor, dim: int, group: str) -> Tensor:
    checked_dimension("flip_sequence", x, dim)
    return fresh_like(x)


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple:
    return flip_sequence(grad, ctx.dim, ctx.group), None, None


flip_sequence.register_autograd(_gradient, setup_context=_context)
