"""`on_unsupported="gather"`: what cannot be split is computed on the whole sequence, on every rank.

Contract: the result is the unsharded model's, gradients included, at the price of the memory and the communication
of the full length. A region (from values that are local to a position to the first value that has one row for each
position, or none at all) is copied into the graph with its inputs gathered and every size that depends on the
length made global; each rank keeps its rows of the result. This needs the length as a symbol: with a constant it
cannot be told which numbers mean it.

One region is gathered at a time, in a graph that nothing else has been done to since it was analysed
(`shard.gather_one`): what is copied has to read what it was analysed with, and what follows has to be analysed with
the result.
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
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.length import depends_on, global_number
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import is_transform, modes
from zeco_compile.passes.plans import Emit, Plan, Ranks, bytes_of, settle, settled
from zeco_compile.passes.region import Region, cut_region
from zeco_compile.passes.report import op_name
from zeco_compile.passes.schema import is_random, shape
from zeco_compile.passes.sizes import Size

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
    found = _to_copy(analysis, region, user_node)
    if found is None:
        return None
    copied, gathered = found
    mode_of = modes(analysis.gm.graph)
    if any(mode_of[node] != mode_of[user_node] for node in copied):
        return None
    return Plan(
        "gathered",
        f"{len(copied)} node(s) on the whole sequence",
        _copying(analysis, copied, gathered, user_node, results),
        tuple(("among all ranks", bytes_of(analysis, value)) for value, _ in gathered.values()),
        copied,
    )


_Gathered = dict[fx.Node, tuple[fx.Node, int]]
"""What the copies read in place of a node of the user's graph that runs along the sequence: its value, gathered in a
dimension."""


def _to_copy(
    analysis: Analysis, region: Region, user_node: fx.Node
) -> tuple[tuple[fx.Node, ...], _Gathered] | None:
    """The nodes of the user's graph that compute the region, in order, and the values that they are given; None if a
    second computation cannot take the place of the first."""
    shadow, interior = analysis.shadow, set(region.interior)
    inside, gathered = set(region.user_nodes), _Gathered()
    kept: set[fx.Node] = set()
    stack = [user_node, *inside]
    while stack:
        node = stack.pop()
        inside.add(node)
        for argument in node.all_input_nodes:
            if argument in inside or argument in kept or argument in gathered:
                continue
            read = shadow.tensors_read(node, argument)
            sized = any(depends(analysis, size) for each in read for size in shape(each))
            computed = read or shadow.groups.get(argument, [])  # of a number, what it was read off
            if argument.op in ("call_function", "call_method") and not interior.isdisjoint(read):
                stack.append(argument)  # a name of something that is computed inside, `contiguous()` of it
            elif any(analysis.state(each) is State.MIXED for each in computed):
                return None
            elif not read and _holds_lengths(analysis, argument):
                if argument.op not in ("call_function", "call_method"):
                    return None
                stack.append(argument)
            elif not sized:
                kept.add(argument)
            elif (dim := _whole_rows(analysis, shadow.reads.get((node, argument)))) is not None:
                gathered[argument] = (read[0], dim)
            else:
                return None
    if any(settled(node) and shadow.tensors_made(node) for node in inside):
        return None  # made for slices
    if any(is_transform(node) for node in inside):
        return None  # `torch.vmap` begins and ends at nodes that these do not read
    memory = {key for node in (*kept, *gathered) for key in shadow.memory.get(node, ())}
    own = {key for node in inside for key in shadow.writes.get(node, ())}
    for node in analysis.gm.graph.nodes:
        leaves = node is not user_node and any(user not in inside for user in node.users)
        once = node in shadow.writes or any(is_random(each) for each in shadow.groups.get(node, ()))
        if node in inside and leaves and once:
            return None  # both computations would write, or they would draw different numbers
        if leaves and not own.isdisjoint(shadow.memory.get(node, ())):
            return None  # others read what is written to inside
        if node not in inside and not memory.isdisjoint(shadow.writes.get(node, ())):
            return None  # what is read may not be there any more
    if not own.isdisjoint({key for node in gathered for key in shadow.memory.get(node, ())}):
        return None
    order = list(analysis.gm.graph.nodes)  # of the exchanges too: it is the same on all ranks
    return (
        tuple(node for node in order if node in inside),
        {node: gathered[node] for node in order if node in gathered},
    )


def _holds_lengths(analysis: Analysis, node: fx.Node) -> bool:
    """It is a `torch.Size`, a tuple, a slice or a truth made of numbers from the length, and no such number itself."""
    symbols = sympy.sympify(analysis.length).free_symbols
    held = node.meta.get("example_value")
    if isinstance(held, torch.SymInt | torch.SymFloat):
        return False
    return any(depends_on(each, symbols) for each in node.all_input_nodes) or any(
        isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        and bool(leaf.node.expr.free_symbols & symbols)
        for leaf in pytree.tree_leaves(held)
    )


def _whole_rows(analysis: Analysis, value: Any) -> int | None:
    """The dimension in which a value can be gathered, if it has all rows of the slice, in one dimension."""
    if not isinstance(value, fx.Node) or analysis.state(value) is not State.LOCAL:
        return None
    dims = analysis.track.sequence_dims(value)
    if len(dims) != 1 or not analysis.track.axes.is_whole_sequence(analysis.track.dims(value)[dims[0]]):
        return None
    others = [size for i, size in enumerate(shape(value)) if i not in dims]
    return None if any(depends(analysis, size) for size in others) else dims[0]


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
        # The axes of what an op without a rule returns are not known. On the whole sequence, those with as many rows
        # as positions are cut into slices; with another number from the length, no rank could hold its part.
        sized = [i for i, size in enumerate(shape(value)) if i not in dims and depends(analysis, size)]
        rows = [*dims, *sized]
        if len(rows) > 1 or any(not analysis.track.axes.is_length(shape(value)[i]) for i in sized):
            return None
        results.append(_Result(reader, place, value, rows[0] if rows else None))
    return results or None


def depends(analysis: Analysis, size: Size) -> bool:
    """The size is computed from the length."""
    symbols = sympy.sympify(analysis.length).free_symbols
    return bool(sympy.sympify(size).free_symbols & symbols)


def _copying(
    analysis: Analysis,
    copied: tuple[fx.Node, ...],
    gathered: _Gathered,
    user_node: fx.Node,
    results: list[_Result],
) -> Callable[[Ranks], None]:
    symbols = sympy.sympify(analysis.length).free_symbols

    def apply(ranks: Ranks) -> None:
        graph = analysis.gm.graph
        emit = Emit(user_node, after=True)
        whole: dict[fx.Node, fx.Node] = {}
        for argument, (_, dim) in gathered.items():
            whole[argument] = emit.call(
                zeco.gather_sequence.default, argument, dim, ranks.group, ranks.world_size, True
            )
        numbers: dict[fx.Node, fx.Node] = {}
        last = emit.last
        for node in copied:
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
            each.reader.replace_all_uses_with(new, delete_user_cb=_outside(copies))
            if each.reader is not user_node:
                graph.erase_node(each.reader)
        for node in reversed(copied):
            if not node.users:
                graph.erase_node(node)
        warnings.warn(
            f"zeco_compile: `{op_name(user_node)}` at {user_location(user_node)} is computed on the whole sequence "
            'on every rank (on_unsupported="gather")',
            GatheredWarning,
            stacklevel=2,
        )

    return apply


def _outside(copies: set[fx.Node]) -> Callable[[fx.Node], bool]:
    return lambda user: user not in copies
