"""From the whole sequence to a rank's slice, and back: what a user's own code needs around a sharded model.

Rank 0 of the group holds the first positions. Both functions work in eager and under ``torch.compile``, and
are exact adjoints in the sense of the package's contract: a rank's backward gives the gradient of the sum
over ranks of the values that the ranks call ``backward()`` on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeco_compile.lowering import exchange, exchange_parts
from zeco_compile.lowering.groups import resolve_group_and_size


def shard_sequence(x: Tensor, dim: int = 1, group: Any = None) -> Tensor:
    """This rank's slice of ``x``, which every rank holds in full.

    ``x`` has any shape and dtype, and ``dim`` (negative counts from the end) is a multiple of the number of
    ranks long. ``group`` is a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for all ranks; on
    one rank the slice is everything. Returns a new contiguous tensor, 1/P of ``x`` in ``dim``; no
    communication. The gradient of ``x`` is zero outside the slice: summed over the ranks it is the whole.

    Raises `IndivisibleSequence` when the slices would be unequal, `InvalidExchange` when ``x`` has no such
    dimension, `InvalidGroup` for what is no group of this rank.
    """
    name, world_size = resolve_group_and_size(group)
    exchange_parts.check_divisible(x, dim, world_size)
    return exchange.slice_sequence(x, dim, name, world_size)


def gather_sequence(y: Tensor, dim: int = 1, group: Any = None) -> Tensor:
    """All ranks' slices ``y``, one after the other in ``dim``, on every rank.

    ``y`` has any dtype and the same shape on every rank. Returns a new contiguous tensor, P times ``y`` in
    ``dim``. The gradient of ``y`` is the sum over ranks of the gradients that arrive for this rank's slice
    (reduce-scatter), so every rank has to take part in the backward too.

    Raises on every rank `UnequalShards` when the shapes differ; otherwise as `shard_sequence`. A rank that
    does not call it makes the others raise `RankMissing` after the group's timeout.
    """
    name, world_size = resolve_group_and_size(group)
    exchange_parts.check_dimension(y, dim)
    return exchange.gather_sequence(y, dim, name, world_size)
