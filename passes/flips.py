"""Rules for what runs from the end of the sequence: it is turned around, and perhaps turned back.

flip          a slice flipped is a slice of the flipped sequence, that of the rank as far from the other end: the
              two exchange their slices
from the end  with nothing between two flips but calls that cumulate, and what is computed row by row, no slice is
              sent: there only the order of the ranks is another (cumulative.py)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.cumulative import Cumulative, result_taken
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    is_local,
    mixing_nodes,
    row_dim,
    settle,
    single_output,
    substitute,
    window_of,
)
from zeco_compile.passes.schema import argument, is_random, operand, tensors
from zeco_compile.passes.sizes import size_of

aten = torch.ops.aten
zeco = torch.ops.zeco

FLIP = "flip"
"""What the report calls the exchange."""


def flip(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x.flip(1)`, all rows of the slices, perhaps in other dimensions too."""
    node = _flip_of_rows(analysis, user_node)
    if node is None or not is_local(analysis, operand(node, 0)) or _way_back(analysis, user_node) is not None:
        return None
    source, made = operand(node, 0), node.meta["val"]
    read = user_node.args[0] if user_node.args else user_node.kwargs.get("input")
    if not isinstance(read, fx.Node) or analysis.shadow.reads.get((user_node, read)) is not source:
        return None
    dim = row_dim(analysis, source)
    assert dim is not None, "the rows are flipped"
    others = [d for each in argument(node, "dims") if (d := each % made.dim()) != dim]
    order = _as_in_memory(analysis, made)

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        x = user_node.args[0] if user_node.args else user_node.kwargs["input"]  # as it is by then
        if others:
            x = emit.call(torch.flip, x, others)
        if order == sorted(order):
            new = emit.call(zeco.flip_sequence.default, x, dim, ranks.group)
        else:  # it is read as a view later on, perhaps
            x = emit.call(aten.permute.default, x, order)
            new = emit.call(zeco.flip_sequence.default, x, order.index(dim), ranks.group)
            new = emit.call(aten.permute.default, new, [order.index(d) for d in range(len(order))])
        substitute(user_node, new)

    return Plan(
        FLIP,
        "slices exchanged with the rank as far from the other end of the sequence",
        apply,
        (("to the opposite rank", bytes_of(analysis, source)),),
    )


def _as_in_memory(analysis: Analysis, made: torch.Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost: a flip keeps that order."""
    hints = analysis.track.axes.facts.hints
    strides = [sympy.sympify(size_of(stride)).subs(hints) for stride in made.stride()]
    return sorted(range(made.dim()), key=lambda d: -strides[d])


def cumulative_backwards(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The second of two flips, where all between them cumulates, or is computed row by row."""
    if _flipped_rows(analysis, user_node) is None:
        return None
    flips = (node for node in analysis.gm.graph.nodes if _flipped_rows(analysis, node) is not None)
    way = next(
        (way for each in flips if (way := _way_back(analysis, each)) and way.second is user_node), None
    )
    if way is None or not is_local(analysis, operand(way.flipped, 0)):
        return None
    if any(analysis.state(value) is State.MIXED for value in way.others):
        return None

    def apply(ranks: Ranks) -> None:
        for call in way.calls:
            call.apply(ranks, backwards=True)
        settle(way.passed[0])
        settle(user_node)

    return Plan(
        "carry",
        f"{', '.join(call.name for call in way.calls)} from the end of the sequence, from those of the later ranks on",
        apply,
        tuple(("among all ranks", call.sent) for call in way.calls),
        way.passed,
    )


def _flipped_rows(analysis: Analysis, user_node: fx.Node) -> fx.Node | None:
    """The op of a call that turns around all rows of the slices, and in no other dimension."""
    node = _flip_of_rows(analysis, user_node)
    return node if node is not None and len(argument(node, "dims")) == 1 else None


def _flip_of_rows(analysis: Analysis, user_node: fx.Node) -> fx.Node | None:
    """The op of a call that turns around all rows of the slices, perhaps in other dimensions too."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.flip.default or user_node in analysis.shadow.writes:
        return None
    (node,) = mixing
    if single_output(analysis, user_node) is not node or len(analysis.shadow.groups[user_node]) != 1:
        return None
    return node if window_of(analysis, node) == (0, 0) else None


@dataclass(frozen=True)
class _Way:
    """From one flip to the next: the first's op, the calls from it on, the second; `calls` are those that cumulate, the
    last one first, and `others` what is read on the way besides."""

    flipped: fx.Node
    passed: tuple[fx.Node, ...]
    second: fx.Node
    calls: tuple[Cumulative, ...]
    others: tuple[fx.Node, ...]


def _way_back(analysis: Analysis, first: fx.Node) -> _Way | None:
    """What begins with this flip, if it ends with another and cumulates in between. Nobody else may read what is
    computed there, and nothing that runs along the sequence may be read besides."""
    flipped = _flipped_rows(analysis, first)
    if flipped is None:
        return None
    passed, calls, others = [first], list[Cumulative](), list[fx.Node]()
    while True:
        node, readers = passed[-1], list(passed[-1].users)
        if len(readers) != 1 or readers[0].op not in ("call_function", "call_method"):
            return None
        (reader,) = readers
        if reader in analysis.shadow.writes:
            return None
        for each in reader.all_input_nodes:
            values = [] if each is node else analysis.shadow.tensors_read(reader, each)
            if any(map(analysis.track.sequence_dims, values)):
                return None
            others += values
        if _flipped_rows(analysis, reader) is not None:
            kept = all(call.window == (0, 0) for call in calls)
            return (
                _Way(flipped, tuple(passed), reader, tuple(calls[::-1]), tuple(others))
                if calls and kept
                else None
            )
        call = Cumulative.of(analysis, reader)
        values_of = reader.target is operator.getitem and result_taken(reader) == 0
        if call is not None:
            calls.append(call)
        elif not values_of and not _is_row_by_row(analysis, reader):
            return None
        passed.append(reader)


def _is_row_by_row(analysis: Analysis, user_node: fx.Node) -> bool:
    """It computes each row from that row alone, one for one, and makes no positions."""
    group = analysis.shadow.groups.get(user_node, [])
    if not group or mixing_nodes(analysis, user_node) or single_output(analysis, user_node) is None:
        return False
    return all(
        isinstance(node.meta.get("val"), torch.Tensor)
        and not is_random(node)
        and (bool(tensors(node)) or not analysis.track.sequence_dims(node))
        and (not analysis.track.sequence_dims(node) or window_of(analysis, node) == (0, 0))
        for node in group
    )
