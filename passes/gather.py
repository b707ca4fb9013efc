"""`on_unsupported="gather"`: what cannot be split is computed on the whole sequence, on every rank.

Contract: the result is the unsharded model's, gradients included, at the price of the memory and the communication
of the full length. A region (from values that are local to a position to the first value that has one row for each
position, or none at all) is copied into the graph with its inputs gathered and every size that depends on the
length made global; each rank keeps its rows of the result. This needs the length as a symbol: with a constant it
cannot be told which numbers mean it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.length import depends_on, global_number
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import modes
from zeco_compile.passes.plans import Emit, Plan, Ranks, holder_of, settle
from zeco_compile.passes.region import Region, Sizes, cut_region
from zeco_compile.passes.report import op_name

zeco = torch.ops.zeco

_MOST_INPUTS = 64


class GatheredWarning(UserWarning):
    """A part of the model runs on the whole sequence on every rank."""


def gather_region(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The plan that computes what ends at `user_node` on the whole sequence; None if it cannot be done."""
    if isinstance(analysis.length, int):
        return None
    results = _results(analysis, user_node)
    if results is None:
        return None
    region = cut_region(analysis, results[0].value, _MOST_INPUTS)
    if region is None or region.masks:
        return None
    mode_of = modes(analysis.gm.graph)
    if any(mode_of[node] != mode_of[user_node] for node in region.user_nodes):
        return None
    holders: dict[fx.Node, tuple[fx.Node, int | None]] = {}
    for node in region.inputs:
        dims = analysis.track.sequence_dims(node)
        holder = holder_of(analysis, node) or _placeholder(analysis, node)
        if holder is None or len(dims) > 1:
            return None
        if dims and not analysis.track.axes.is_whole_sequence(analysis.track.dims(node)[dims[0]]):
            return None
        holders[node] = (holder, dims[0] if dims else None)
    return Plan(
        "gathered",
        f"{len(region.user_nodes)} node(s) on the whole sequence",
        _copying(analysis, region, holders, user_node, results),
        tuple(
            ("among all ranks", _slice_bytes(analysis, n))
            for n, (_, dim) in holders.items()
            if dim is not None
        ),
        region.user_nodes,
    )


@dataclass(frozen=True)
class _Result:
    """A value that others read: the node of the user's graph that stands for it, its place in a tuple (None if it is
    the node's only result), and its dimension along the sequence (None if it has none)."""

    reader: fx.Node
    place: int | None
    value: fx.Node
    rows: int | None


def _results(analysis: Analysis, user_node: fx.Node) -> list[_Result] | None:
    """What `user_node` returns; None if it is not one row for each position, or none."""
    made = analysis.shadow.value.get(user_node)
    if isinstance(made, fx.Node):
        found: list[tuple[fx.Node, int | None, Any]] = [(user_node, None, made)]
    elif isinstance(made, list | tuple):
        if any(u.target is not operator.getitem for u in user_node.users):
            return None
        places = {u: int(u.args[1]) for u in user_node.users}  # type: ignore[arg-type]
        found = [(u, place, made[place]) for u, place in places.items()]
    else:
        return None
    results = []
    for reader, place, value in found:
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            return None
        dims = analysis.track.sequence_dims(value)
        if len(dims) > 1 or analysis.is_window(value):
            return None
        if dims and not analysis.track.axes.is_whole_sequence(analysis.track.dims(value)[dims[0]]):
            return None
        results.append(_Result(reader, place, value, dims[0] if dims else None))
    return results or None


def _placeholder(analysis: Analysis, node: fx.Node) -> fx.Node | None:
    return next((user for user, value in analysis.shadow.inputs.items() if value is node), None)


def _slice_bytes(analysis: Analysis, node: fx.Node) -> int:
    count = node.meta["val"].dtype.itemsize
    for size in Sizes(analysis, analysis.real_length).shape(node):
        count *= size
    return int(count)


def _copying(
    analysis: Analysis,
    region: Region,
    holders: dict[fx.Node, tuple[fx.Node, int | None]],
    user_node: fx.Node,
    results: list[_Result],
) -> Callable[[Ranks], None]:
    symbols = sympy.sympify(analysis.length).free_symbols

    def apply(ranks: Ranks) -> None:
        graph = analysis.gm.graph
        emit = Emit(user_node, after=True)
        whole: dict[fx.Node, fx.Node] = {}
        for holder, dim in holders.values():
            current = holder
            while "zeco_replaced_by" in current.meta:
                current = current.meta["zeco_replaced_by"]
            if dim is not None:
                whole[holder] = emit.call(
                    zeco.gather_sequence.default, current, dim, ranks.group, ranks.world_size, True
                )
            elif current is not holder:
                whole[holder] = current
        numbers: dict[fx.Node, fx.Node] = {}
        last = emit.last
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in sorted(region.user_nodes, key=lambda n: order.get(n, -1)):
            for source in node.all_input_nodes:
                if depends_on(source, symbols) and source not in whole:
                    whole[source] = global_number(source, symbols, ranks.world_size, numbers)
            with graph.inserting_after(last):
                last = graph.node_copy(node, lambda n: whole.get(n, n))
            settle(last)
            whole[node] = last
        emit.last = last
        for each in results:
            new = whole[user_node]
            if each.place is not None:
                new = emit.call(operator.getitem, new, each.place)
            if each.rows is not None:
                new = emit.call(zeco.slice_sequence.default, new, each.rows, ranks.group, ranks.world_size)
            copies = {*whole.values(), new}
            each.reader.meta["zeco_replaced_by"] = new
            each.reader.replace_all_uses_with(new, delete_user_cb=_outside(copies))
            if each.reader is not user_node:
                graph.erase_node(each.reader)
        _erase(graph, region)
        warnings.warn(
            f"zeco_compile: `{op_name(user_node)}` at {user_location(user_node)} is computed on the whole sequence "
            'on every rank (on_unsupported="gather")',
            GatheredWarning,
            stacklevel=2,
        )

    return apply


def _outside(copies: set[fx.Node]) -> Callable[[fx.Node], bool]:
    return lambda user: user not in copies


def _erase(graph: fx.Graph, region: Region) -> None:
    inside = set(region.user_nodes)
    for node in reversed(list(graph.nodes)):
        if node in inside and node.op in ("call_function", "call_method") and not node.users:
            graph.erase_node(node)
