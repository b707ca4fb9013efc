"""The axes of a whole graph, or of a part of it: each op's rule in the order of the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.axes import Atom, Dim, Dims
from zeco_compile.passes.axis_rules import (  # noqa: F401  (importing them registers their rules)
    elementwise,
    factories,
    joins,
    look_ups,
    own_ops,
    products,
    reductions,
    views,
)
from zeco_compile.passes.axis_rules.registry import rule_for
from zeco_compile.passes.schema import shape, tensors
from zeco_compile.passes.sizes import Size, SizeFacts
from zeco_compile.passes.tracking import Tracking


def track_axes(
    graph: fx.Graph,
    along: Mapping[fx.Node, int | None],
    length: Size,
    facts: SizeFacts,
    end_rows: Collection[fx.Node] = (),
) -> Tracking:
    """Axes of all nodes of a shadow graph. `along` names the dimension of each placeholder that runs along the
    sequence, None for those that do not; `length` is the number of rows of a rank's slice. `end_rows` are slices that
    are known to take as many rows whatever the length is."""
    track = Tracking(length, facts, end_rows)
    for node in graph.nodes:
        if node.op == "call_function":
            visit(track, node)
        elif node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                track.scalar(node)
                continue
            dims = [
                (track.axes.sequence,)
                if i == along.get(node)
                else track.axes.fresh(size, f"{node.op} {node.name}")
                for i, size in enumerate(shape(node))
            ]
            track.out(node, tuple(dims))
    return track


def track_region(whole: Tracking, given: Iterable[fx.Node], interior: Iterable[fx.Node]) -> Tracking | None:
    """Axes of a part of a graph, as if the values `given` to it had nothing to do with each other.

    In the whole graph two axes can be one for reasons outside of the part: q, k and v that are cut from one stacked
    projection have the same feature axis, though keys and values are different axes of an attention. None where a
    value does not run along the sequence as a whole.
    """
    track = Tracking(whole.axes.length, whole.axes.facts)
    named: set[fx.Node] = set()
    for node in given:
        own: dict[Atom, Atom] = {}
        # What it was made from is told by the same axes: a gate may be taken from before an exp and some views.
        current, steps = node, 0
        while current not in named and steps < _FEW:
            dims = _renamed(whole, track, current, own)
            if dims is None and current is node:
                return None
            if dims is None:
                break
            track.out(current, dims)
            named.add(current)
            sources = [
                n for n in tensors(current) if n.meta["val"].dtype is not torch.bool
            ]  # a mask beside it
            if len(sources) != 1:
                break
            current, steps = sources[0], steps + 1
    for node in interior:
        visit(track, node)
    return track


_FEW = 8


def _renamed(whole: Tracking, track: Tracking, node: fx.Node, own: dict[Atom, Atom]) -> Dims | None:
    """The dimensions of a value of `whole` in atoms of `track`; `own` holds the new atom of each old one."""
    rows = whole.axes.flat((whole.axes.sequence,))
    dims: list[Dim] = []
    for dim in whole.dims(node):
        flat = whole.axes.flat(dim)
        new: list[Atom] = []
        while flat:
            if flat[: len(rows)] == rows:
                new.append(track.axes.sequence)
                flat = flat[len(rows) :]
                continue
            atom = flat[0]
            if atom.sequence:
                return None
            if atom not in own:
                own[atom] = Atom(atom.size)
                own[atom].origins |= atom.origins
            new.append(own[atom])
            flat = flat[1:]
        dims.append(tuple(new))
    return tuple(dims)


def visit(track: Tracking, node: fx.Node) -> None:
    track.current = node
    if isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
        track.scalar(node)
        return
    track.mark_stepwise(node, any(track.stepwise(source) for source in node.all_input_nodes))
    rule_of_op = rule_for(node.target)
    if torch_private.checks_only(node):  # what it returns are tokens that keep it in its place
        track.outs(node, [()] * len(node.meta["val"]))
    elif rule_of_op is None:
        track.opaque(node, "an op without a rule")
    else:
        rule_of_op(track, node)
    selects = any(action.kind == "select" for action in track.acts_along_sequence(node))
    if selects or track.sequence_dims(node):
        track.mark_stepwise(node, not track.sequence_dims(node))
