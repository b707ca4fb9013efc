"""The last look at a rewritten graph: is every value what the contract says, and every output too?

It analyses the graph as it stands, from nothing: no pass is believed. What was rewritten carries a mark; anything
else that mixes positions, any output that is no slice, any size or parameter that is tied to the length of a slice
is an error.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis, State, assign_states
from zeco_compile.passes.errors import LengthInValue, UnsupportedOp
from zeco_compile.passes.functions import refuse_mixing_backwards
from zeco_compile.passes.locations import source_expression, user_location
from zeco_compile.passes.plans import settled
from zeco_compile.passes.report import op_name
from zeco_compile.passes.schema import argument, is_random, shape, tensors
from zeco_compile.passes.shard import refuse_mixed

aten = torch.ops.aten


def verify(analysis: Analysis) -> list[int | None]:
    """Raises UnsupportedOp for the first thing that is not as it should be.

    Returns the dimension of each output of the graph that runs along the sequence, None for those that have none.
    """
    assign_states(analysis, settled)
    refuse_mixed(analysis)
    refuse_mixing_backwards(analysis)
    _refuse_length_elsewhere(analysis)
    _refuse_owned_rows(analysis)
    _refuse_constant_rows(analysis)
    _refuse_unknown_rows(analysis)
    _refuse_sizes_of_the_slice(analysis)
    _refuse_partial_outputs(analysis)
    return _output_dims(analysis)


def _output_dims(analysis: Analysis) -> list[int | None]:
    output = next(n for n in analysis.gm.graph.nodes if n.op == "output")
    dims: list[int | None] = []
    for leaf in pytree.tree_leaves(output.args[0]):
        value = analysis.shadow.reads.get((output, leaf)) if isinstance(leaf, fx.Node) else None
        along = analysis.track.sequence_dims(value) if isinstance(value, fx.Node) else []
        dims.append(along[0] if along else None)
    return dims


def _refuse_owned_rows(analysis: Analysis) -> None:
    """A parameter with one row per position of the slice: the unsharded model cannot have it."""
    owners = [o for o in analysis.track.axes.sequence.root().origins if str(o).startswith("placeholder ")]
    for origin in owners:
        name = str(origin).removeprefix("placeholder ")
        user_input = next(
            (i for i in analysis.inputs if str(analysis.shadow.inputs.get(i.node)) == name), None
        )
        if user_input is None:
            continue
        users = [u for u in user_input.node.users if u.op != "output"]
        raise UnsupportedOp(
            op_name(users[0]) if users else "an input",
            location=user_location(users[0] if users else None),
            why=f"`{source_expression(user_input.name)}` is whole on every rank, but one of its dimensions is "
            "combined with the sequence, row by row: it would need the rows of the whole sequence.",
            hints=[
                "if it is an input that runs along the sequence, call zeco_compile.mark_sequence(tensor, dim)",
                "if it is a table of positions, slice it by the length: table[: x.shape[1]]",
            ],
            node=str(user_input.node),
        )


def _refuse_constant_rows(analysis: Analysis) -> None:
    """A constant of the code with one row per position of the slice: `torch.tensor([f(i) for i in range(T)])`."""
    origins = {str(o) for o in analysis.track.axes.sequence.root().origins}
    for node in analysis.shadow.graph.nodes:
        if node.op == "get_attr" and f"get_attr {node.name}" in origins:
            users = [analysis.user_node(user) for user in node.users]
            user_node = next((user for user in users if user is not None), None)
            raise UnsupportedOp(
                op_name(user_node) if user_node is not None else "a constant",
                location=user_location(user_node),
                why="a constant that the code computed has one row for each position of this rank's slice: the "
                "values are those of the first positions on every rank.",
                hints=["compute it from torch.arange(length), or take rows of a table: table[: x.shape[1]]"],
            )


def _refuse_unknown_rows(analysis: Analysis) -> None:
    """Rows of the sequence made of something whole by an op that is neither a rule's nor gives all rows the same value:
    `table.split([T, rest])[0]`, `F.pad(first, (0, 0, 0, T - 1))`. Every rank would have those of the first slice."""
    track = analysis.track
    for node in analysis.shadow.graph.nodes:
        sources = tensors(node.all_input_nodes[0] if node.target is operator.getitem else node)
        if not sources or not isinstance(node.meta.get("val"), torch.Tensor) or not track.sequence_dims(node):
            continue
        rows = any(track.sequence_dims(n) for n in sources)
        user_node = analysis.user_node(node)
        spreads = node.target in SHAPED_LIKE or node.target in _SPREADS or is_random(node)
        if rows or spreads or user_node is None or settled(user_node):
            continue
        raise UnsupportedOp(
            op_name(user_node),
            location=user_location(user_node),
            why="it makes one row for each position of the slice from something that is whole on every rank: they "
            "would be the first ones on each.",
            hints=["take the rows of a table as table[: x.shape[1]]"],
            node=str(user_node),
        )


# one row, or none, for all positions
_SPREADS = (aten.expand.default, aten.broadcast_to.default)


def _refuse_length_elsewhere(analysis: Analysis) -> None:
    """A number from the length that is a size of, or a place in, something that does not run along the sequence: the
    row of a table, some features, copies of a parameter. Of the whole sequence's length it would be another."""
    if isinstance(analysis.length, int):
        return  # another trace shows it (second_look.py)
    symbols, track = analysis.length.free_symbols, analysis.track

    def depends(value: Any) -> bool:
        made = value.meta.get("val") if isinstance(value, fx.Node) else value
        return isinstance(made, torch.SymInt) and bool(made.node.expr.free_symbols & symbols)

    for node in analysis.shadow.graph.nodes:
        user_node, value = analysis.user_node(node), node.meta.get("val")
        if user_node is None or settled(user_node) or node.op != "call_function":
            continue
        elsewhere = isinstance(value, torch.Tensor) and any(
            depends(size) and not track.axes.is_sequence(dim)
            for size, dim in zip(value.shape, track.dims(node), strict=True)
        )
        if node.target in (aten.select.int, aten.slice.Tensor):
            source = node.args[0]
            dim = argument(node, "dim", 0) % source.meta["val"].dim()
            along = dim in track.sequence_dims(source) or analysis.is_table_lookup(node)
            elsewhere |= not along and any(depends(each) for each in node.args[1:])
        if node.target in (aten.tril.default, aten.triu.default) and depends(argument(node, "diagonal", 0)):
            elsewhere |= not set(track.sequence_dims(node)) & {value.dim() - 1, value.dim() - 2}
        if elsewhere:
            raise LengthInValue(
                str(analysis.length),
                location=user_location(user_node),
                why=f"`{op_name(user_node)}` takes a size or a place from it in something that does not run along the "
                "sequence; the length of the whole sequence would give another.",
            )


def _refuse_sizes_of_the_slice(analysis: Analysis) -> None:
    """A factory whose size follows from the length without being it, or whose positions belong to nothing."""
    length = analysis.length
    axes = analysis.track.axes
    for node in analysis.shadow.graph.nodes:
        user_node = analysis.user_node(node)
        if user_node is None or settled(user_node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if not analysis.is_constant(node):
            continue
        for atom in (a for dim in analysis.track.dims(node) for a in axes.flat(dim) if not a.sequence):
            symbolic = not isinstance(length, int) and bool(
                sympy.sympify(atom.size).free_symbols & sympy.sympify(length).free_symbols
            )
            ambiguous = (
                isinstance(length, int)
                and length > 1
                and atom.size == length
                and atom.origins <= {"position", "factory"}
                and "position" in atom.origins
            )
            if symbolic or ambiguous:
                raise UnsupportedOp(
                    op_name(user_node),
                    location=user_location(user_node),
                    why=f"it makes a tensor of size {atom.size}, "
                    + (
                        "computed from the length of the slice: on the whole sequence it would be another."
                        if symbolic
                        else "which is the length of the slice, but nothing tells whether it means the length."
                    ),
                    node=str(user_node),
                )


def _refuse_partial_outputs(analysis: Analysis) -> None:
    output = next(n for n in analysis.gm.graph.nodes if n.op == "output")
    for returned in output.all_input_nodes:
        for value in analysis.shadow.tensors_read(output, returned):
            state = analysis.state(value)
            dims = analysis.track.sequence_dims(value)
            if _has_another_length(analysis, value):
                raise UnsupportedOp(
                    op_name(returned),
                    location=user_location(returned),
                    why="an output of the graph has a size that is computed from the length, and is not known to be "
                    "the rows of the sequence.",
                    node=str(returned),
                )
            folded = any(len(analysis.track.axes.flat(analysis.track.dims(value)[d])) > 1 for d in dims)
            first = dims and folded and not _outermost(analysis, value, dims)
            if state is State.LOCAL and len(dims) <= 1 and not first:
                continue
            raise UnsupportedOp(
                op_name(returned),
                location=user_location(returned),
                why="an output of the graph holds only some rows of the sequence (a slice of it, or rows of several "
                "axes folded together), so the ranks' parts cannot be put side by side.",
                node=str(returned),
            )


def _has_another_length(analysis: Analysis, value: fx.Node) -> bool:
    if isinstance(analysis.length, int) or not isinstance(value.meta.get("val"), torch.Tensor):
        return False  # another trace shows it (second_look.py)
    symbols = analysis.length.free_symbols
    return any(
        bool(sympy.sympify(size).free_symbols & symbols) and not analysis.track.axes.is_sequence(dim)
        for size, dim in zip(shape(value), analysis.track.dims(value), strict=True)
    )


def _outermost(analysis: Analysis, value: fx.Node, dims: list[int]) -> bool:
    """[B*T, D] is no slice of the whole [B*T, D] unless B is 1."""
    flat = analysis.track.axes.flat(analysis.track.dims(value)[dims[0]])
    return flat[0].sequence
