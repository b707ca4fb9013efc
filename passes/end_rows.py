"""Rows at an end of the sequence, `y[:, -3:]`, where the length is a constant.

With a symbol for the length such a slice shows by its size, which is a number. With a constant `y[:, -3:]` of six rows
and `y[:, :-3]` look alike. What tells them apart is the trace of the whole sequence (zeco_compile/second_look.py): the
one has as many rows there, at the same end. `common(node, other)` compares the two; `take_rows` has the axes of a graph
followed once more with what is known then, so that the rows are no part of the sequence any more.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axis_rules.walk import track_axes
from zeco_compile.passes.schema import argument, operand, shape

aten = torch.ops.aten


def ends(node: fx.Node) -> tuple[int, int, int] | None:
    """How many rows a slice, a single row or a write to such takes, and how many it leaves out before and behind; None
    where these are no numbers, or it takes every second one."""
    into, dim = operand(node, 0), argument(node, "dim", 0)
    size = shape(into)[dim % len(shape(into))]
    if node.target in (aten.select.int, aten.select_scatter.default):
        start, count = argument(node, "index"), 1
    else:
        start = argument(node, "start", 0) or 0
        count = shape(node if node.target is aten.slice.Tensor else operand(node, 1))[dim]
        if argument(node, "step", 1) != 1:
            return None
    if not all(isinstance(each, int) for each in (start, count, size)):
        return None
    start = max(start + size, 0) if start < 0 else start
    return count, start, size - start - count


def is_first(node: fx.Node, other: fx.Node) -> bool | None:
    """Whether `node` takes the rows of a short sequence that `other` takes of a longer one, counted from the first row
    (True) or from the last one (False); None if it does neither: `x[:, T // 8]` takes the first row of a short one."""
    own, theirs = ends(node), ends(other)
    if own is None or theirs is None or own[0] != theirs[0]:
        return None
    if own[1] == theirs[1]:
        return True
    return False if own[2] == theirs[2] else None


def takes_rows(analysis: Analysis, node: fx.Node, longer: Analysis, other: fx.Node) -> bool:
    """`node` is a slice of the sequence that has as many rows in the analysis of a longer one, at the same end."""
    both = is_slice_of_rows(analysis, node) and is_slice_of_rows(longer, other)
    return both and is_first(node, other) is not None


def is_slice_of_rows(analysis: Analysis, node: fx.Node) -> bool:
    """It takes rows of the sequence, or of a window of it; all of them perhaps."""
    if node.target is not aten.slice.Tensor:
        return False
    source = operand(node, 0)
    dim = argument(node, "dim", 0) % len(shape(source))
    return analysis.track.axes.window_of(analysis.track.dims(source)[dim]) is not None


def rows_taken(node: fx.Node) -> str | None:
    """What a slice takes, for messages."""
    found = ends(node) if node.target is aten.slice.Tensor else None
    return None if found is None else f"{found[0]} of {sum(found)} rows, from row {found[1]} on"


def as_many_as_there_are(node: fx.Node | None, other: fx.Node | None) -> int | None:
    """How many rows `other` takes of a longer sequence, where `node` takes all of a short one, which has no more; None
    where it is not so."""
    if node is None or other is None or other.target is not aten.slice.Tensor:
        return None
    if node.target not in (aten.slice.Tensor, aten.alias.default):  # of all rows it need not be a slice
        return None
    there, dim = ends(other), argument(other, "dim", 0) % len(shape(other))
    all_of_them = shape(operand(node, 0)) == shape(node) and len(shape(node)) == len(shape(other))
    if there is None or not all_of_them or there[0] < shape(node)[dim] or there[0] == sum(there):
        return None
    return there[0]


def take_rows(analysis: Analysis, slices: Collection[fx.Node]) -> None:
    """Follows the axes of a graph once more: what `slices` take is no part of the sequence."""
    along = {
        analysis.shadow.inputs[i.node]: i.along for i in analysis.inputs if i.node in analysis.shadow.inputs
    }
    facts = analysis.track.axes.facts
    analysis.track = track_axes(analysis.shadow.graph, along, analysis.length, facts, slices)
