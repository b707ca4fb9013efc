"""Rows of the sequence that an index picks, and the index of an extreme over the sequence: over all ranks.

`y[torch.arange(B), lengths - 1]`, `y.gather(1, last)`: the index has no dimension along the sequence, is the same on
all ranks and counts the rows of the whole sequence. Each row is read by the rank that has it, and the sum over the
ranks is everybody's; its gradient goes to that row alone. `x.argmax(1)`, `x.max(1)`: each rank finds its first extreme,
and the first of the ranks' is the sequence's, NaN included, as it is without ranks.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.over_all_ranks import Over, Rule
from zeco_compile.passes.plans import kinds
from zeco_compile.passes.schema import argument, operand, shape, tensors

aten = torch.ops.aten
zeco = torch.ops.zeco

_INDEXED = (aten.index.Tensor, aten.gather.default, aten.index_select.default)
_PLACES = (aten.argmax.default, aten.argmin.default)
_EXTREMES = (aten.max.dim, aten.min.dim)


def rule_of_rows(analysis: Analysis, node: fx.Node) -> Rule | None:
    """What reads rows by an index, or finds where an extreme is, over all ranks, where that is what the op does."""
    if node.target in _INDEXED and _reads_whole_rows(analysis, node):
        (rows,) = analysis.track.sequence_dims(operand(node, 0))
        return Rule(partial(_read, rows), _can_be_summed)
    if node.target in (*_PLACES, *_EXTREMES) and _is_along_rows(analysis, node):
        return _EXTREME
    return None


# ----------------------------------------------------------------------------------------------- rows by their number


def _indices(node: fx.Node) -> dict[int, fx.Node]:
    """The index of each dimension that has one."""
    if node.target is aten.index.Tensor:
        given = cast(list[Any], node.args[1])
        return {dim: each for dim, each in enumerate(given) if each is not None}
    return {argument(node, "dim") % operand(node, 0).meta["val"].dim(): operand(node, 2)}


def _reads_whole_rows(analysis: Analysis, node: fx.Node) -> bool:
    """One dimension of the source is the whole sequence, and nothing of the indices has rows of it, or as many as the
    length says: a rank would have a part of them only."""
    track, source, indices = analysis.track, operand(node, 0), _indices(node)
    rows = track.sequence_dims(source)
    if kinds(analysis, node) != {"look-up"} or analysis.is_misaligned(node) or len(rows) != 1:
        return False
    if rows[0] not in indices or not track.axes.is_whole_sequence(track.dims(source)[rows[0]]):
        return False
    symbols = sympy.sympify(analysis.length).free_symbols
    for index in indices.values():
        if track.sequence_dims(index) or index.meta["val"].dtype not in _WHOLE_NUMBERS:
            return False
        if any(sympy.sympify(size).free_symbols & symbols for size in shape(index)):
            return False
    return not track.sequence_dims(node)


_WHOLE_NUMBERS = (torch.int32, torch.int64)


def _can_be_summed(node: fx.Node) -> bool:
    return node.meta["val"].dtype != torch.bool and not argument(node, "sparse_grad", False)


def _read(dim: int, over: Over, node: fx.Node, *values: fx.Node) -> fx.Node:
    """The sequence is dimension `dim`. Numbers that no rank has rows for raise, as they do without ranks."""
    given = dict(zip(tensors(node), values, strict=True))
    x, places = given[operand(node, 0)], {d: given[index] for d, index in _indices(node).items()}
    length = over.call(aten.sym_size.int, x, dim)
    whole = over.call(operator.mul, length, over.ranks.world_size)
    number = over.call(aten.to.dtype, places[dim], torch.int64)
    if node.target is aten.index.Tensor:  # which alone counts from the end, too
        number = over.call(
            torch.where, over.call(torch.lt, number, 0), over.call(torch.add, number, whole), number
        )
    place = over.call(torch.sub, number, over.call(operator.mul, length, over.ranks.rank))
    here = over.call(torch.logical_and, over.call(torch.ge, place, 0), over.call(torch.lt, place, length))
    known = over.call(torch.logical_and, over.call(torch.ge, number, 0), over.call(torch.lt, number, whole))
    place = over.call(torch.where, here, place, over.call(torch.where, known, 0, whole))
    rank = operand(node, 0).meta["val"].dim()
    if node.target is aten.gather.default:
        found = over.call(torch.gather, x, dim, place)
    elif node.target is aten.index_select.default:
        found = over.call(torch.index_select, x, dim, place)
        here = _unsqueezed(over, here, rank - 1 - dim)
    else:
        places[dim] = place
        found = over.call(aten.index.Tensor, x, [places.get(d) for d in range(max(places) + 1)])
        adjacent = max(places) - min(places) + 1 == len(places)
        here = _unsqueezed(over, here, rank - 1 - max(places) if adjacent else rank - len(places))
    return over.everywhere(over.call(torch.where, here, found, 0))


def _unsqueezed(over: Over, x: fx.Node, times: int) -> fx.Node:
    for _ in range(times):
        x = over.call(torch.unsqueeze, x, -1)
    return x


# ----------------------------------------------------------------------------------------------- where an extreme is


def _is_along_rows(analysis: Analysis, node: fx.Node) -> bool:
    """Over the dimension of the whole sequence, and no other."""
    track, source, dim = analysis.track, operand(node, 0), argument(node, "dim")
    if dim is None or kinds(analysis, node) != {"reduce"} or analysis.is_misaligned(node):
        return False
    dim %= source.meta["val"].dim()
    whole = track.axes.is_whole_sequence(track.dims(source)[dim])
    return whole and track.sequence_dims(source) == [dim]


def _is_ordered(node: fx.Node) -> bool:
    dtype = operand(node, 0).meta["val"].dtype
    return dtype != torch.bool and not dtype.is_complex


def _extreme(over: Over, node: fx.Node, x: fx.Node) -> Any:
    dim = argument(node, "dim") % operand(node, 0).meta["val"].dim()
    find = torch.max if node.target in (aten.argmax.default, aten.max.dim) else torch.min
    ranks = over.ranks
    if node.target in _PLACES:
        x = over.call(aten.detach.default, x)
    own = over.call(find, x, dim, True)
    value, place = (over.call(operator.getitem, own, i) for i in (0, 1))
    before = over.call(operator.mul, over.call(aten.sym_size.int, x, dim), ranks.rank)
    place = over.call(torch.add, place, before)
    values, places = (
        over.call(zeco.gather_sequence.default, each, dim, ranks.group, ranks.world_size, True)
        for each in (value, place)
    )
    best = over.call(find, values, dim, True)
    value, winner = (over.call(operator.getitem, best, i) for i in (0, 1))
    place = over.call(torch.gather, places, dim, winner)
    if not argument(node, "keepdim", False):
        value, place = (over.call(torch.squeeze, each, dim) for each in (value, place))
    return place if node.target in _PLACES else (value, place)


_EXTREME = Rule(_extreme, _is_ordered)
