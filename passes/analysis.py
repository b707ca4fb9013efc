"""What a graph does to positions: the basis on which passes decide, recomputed after every rewrite.

Every value of the shadow graph is in one of three states:

- LOCAL: on every rank it is the slice of the unsharded value (or equal to it, where it has no sequence axis),
  as the graph stands or once its op is rewritten by a rule of `sharding_rules`;
- WINDOW: the same, but only some rows of the slice (`x[:, :-1]`);
- MIXED: what the graph computes on a slice is not a part of what the unsharded model computes.

A value that depends on a MIXED one is MIXED, up to the output of a recognised region, which is LOCAL again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.axis_rules.walk import track_axes, track_region
from zeco_compile.passes.inputs import GraphInput, graph_inputs, local_length
from zeco_compile.passes.locations import expression, source_expression
from zeco_compile.passes.report import op_name
from zeco_compile.passes.schema import argument, is_random, operand
from zeco_compile.passes.shadow import Shadow, build_shadow, merge_alike
from zeco_compile.passes.sizes import Size, facts_of, size_of
from zeco_compile.passes.tracking import Action, Tracking


class State(enum.Enum):
    LOCAL = "local"
    WINDOW = "window"
    MIXED = "mixed"


@dataclass
class Analysis:
    """Shadow, axes and states of one graph. `length` is the number of rows of this rank's slice."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    inputs: list[GraphInput]
    length: Size
    shadow: Shadow
    track: Tracking
    states: dict[fx.Node, State] = field(default_factory=dict)

    def state(self, node: fx.Node) -> State:
        return self.states.get(node, State.LOCAL)

    def own_mixing(self, node: fx.Node) -> list[Action]:
        """The actions of one ATen node that look at other positions. Taking rows out (a slice) is none."""
        return [a for a in self.track.acts_along_sequence(node) if a.kind != "slice"]

    def mixes(self, node: fx.Node) -> bool:
        """The op needs something done about it, or its result is MIXED."""
        return (
            bool(self.own_mixing(node))
            or self.is_pair(node)
            or self.is_misaligned(node)
            or self.is_table_lookup(node)
            or self.is_drawn_for_all(node)
        )

    def is_drawn_for_all(self, node: fx.Node) -> bool:
        """Random numbers that are of no position: they have to be the same on all ranks, whose generators differ."""
        value = node.meta.get("val")
        if not is_random(node) or self.track.stepwise(node):
            return False
        dims: Any = self.track.dims(node)
        made = [*zip(value, dims, strict=True)] if isinstance(value, list | tuple) else [(value, dims)]
        alike = [
            not any(self.track.axes.is_sequence(dim) for dim in each) for x, each in made if _has_elements(x)
        ]
        return bool(alike) and all(alike)

    def is_table_lookup(self, node: fx.Node) -> bool:
        """A slice of something whole whose result runs along the sequence: one row for each position."""
        if node.target is not torch.ops.aten.slice.Tensor:
            return False
        source = operand(node, 0)
        dim = argument(node, "dim", 0) % source.meta["val"].dim()
        sequence, dims = self.track.axes.is_sequence, self.track.dims
        return sequence(dims(node)[dim]) and not sequence(dims(source)[dim])

    def is_pair(self, node: fx.Node) -> bool:
        """The value has two axes along the sequence, as a matrix of scores has."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        axes = self.track.axes
        atoms = [a for dim in self.track.dims(node) for a in axes.flat(dim) if a.sequence]
        whole = axes.flat((axes.sequence,))
        return len(atoms) > len(set(atoms)) or (len(set(atoms)) > 1 and not set(atoms) <= set(whole))

    def is_misaligned(self, node: fx.Node) -> bool:
        """Rows of different windows are combined: row i belongs to several positions."""
        return node in self.track.misaligned

    def is_window(self, node: fx.Node) -> bool:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        axes = self.track.axes
        return any(axes.is_sequence(d) and not self._whole(d) for d in self.track.dims(node))

    def _whole(self, dim: Any) -> bool:
        """Its sequence atoms are those of all rows (possibly taken apart into chunks)."""
        axes = self.track.axes
        whole = set(axes.flat((axes.sequence,)))
        return all(atom in whole for atom in axes.flat(dim) if atom.sequence)

    def is_constant(self, node: fx.Node) -> bool:
        """Made from sizes alone, whatever the inputs are."""
        return node in self._constants

    _constants: set[fx.Node] = field(default_factory=set)

    at_whole_length: Callable[[fx.Node], fx.Node | None] | None = None
    """Where the length is a constant: the op of this shadow graph in a trace of the whole sequence, None if that has
    no such op. Not known before the last passes."""

    with_whole_numbers: set[fx.Node] = field(default_factory=set)
    """The ops of this shadow graph that have been written again with the numbers that they have there."""

    gathered: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """Values of all ranks by this graph's value and dimension: the node of the user's graph that has them."""

    from_sums: set[fx.Node] = field(default_factory=set)
    """Values computed from a sum over (a part of) the sequence that a rule will make right, and not from a region:
    a state of chunks looks like that, too."""

    @property
    def real_length(self) -> int:
        """The rows of this rank's slice at this call, also where the trace has a symbol for them."""
        each = next(i for i in self.inputs if i.along is not None)
        return int(self.example_inputs[each.index].shape[each.along])

    def of_region(self, given: Sequence[fx.Node], interior: Sequence[fx.Node]) -> Analysis:
        """The same with the axes of a region seen by themselves (`track_region`), where that can be done."""
        sources = {
            s for n in interior for s in n.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)
        }
        inside = set(interior)
        outer = [n for n in self.shadow.graph.nodes if n in sources and n not in inside]
        track = track_region(self.track, dict.fromkeys((*given, *outer)), interior)
        return self if track is None else replace(self, track=track)

    def escapes(self, user_node: fx.Node) -> list[fx.Node]:
        """ATen nodes of one user node that others read."""
        group = self.shadow.groups.get(user_node, [])
        inside = set(group)
        return [n for n in group if any(u not in inside for u in n.users)]

    def described(self, node: fx.Node) -> str:
        """A value of the shadow graph, as the user knows it: an input by its name, others by the line of code."""
        for each in self.inputs:
            if self.shadow.inputs.get(each.node) is node:
                return f"`{source_expression(each.name)}`"
        user_node = self.user_node(node)
        return expression(user_node, str(node if user_node is None else op_name(user_node)))

    def user_node(self, node: fx.Node) -> fx.Node | None:
        return self.shadow.origin.get(node)


TAKES_END_ROWS = "zeco_end_rows"
"""Mark of nodes of the user's graph whose slices of the sequence have as many rows whatever the length is."""


def analyse(gm: fx.GraphModule, example_inputs: Sequence[Any], seq_dim: int) -> Analysis | None:
    """The analysis of `gm` without states; None if no input runs along the sequence."""
    inputs = graph_inputs(gm, example_inputs, seq_dim)
    mode, fakes = torch_private.fake_inputs(gm, example_inputs)
    length = local_length(inputs, fakes, example_inputs)
    if length is None:
        return None
    shadow = build_shadow(gm, example_inputs)
    along = {shadow.inputs[i.node]: i.along for i in inputs if i.node in shadow.inputs}
    merge_alike(shadow, [node for node, dim in along.items() if dim is None])
    end_rows = {n for u, group in shadow.groups.items() if u.meta.get(TAKES_END_ROWS) for n in group}
    track = track_axes(shadow.graph, along, size_of(length), facts_of(mode.shape_env), end_rows)
    analysis = Analysis(gm, example_inputs, inputs, size_of(length), shadow, track)
    for node in shadow.graph.nodes:
        made = node.op == "call_function" and all(
            source in analysis._constants or isinstance(source.meta.get("val"), _NUMBERS)
            for source in node.all_input_nodes
        )
        of_ranks = (
            getattr(node.target, "namespace", "") == "zeco"
        )  # what it returns is another value on each rank
        if (made and not of_ranks) or node.target in SHAPED_LIKE:
            analysis._constants.add(node)
    return analysis


def assign_states(
    analysis: Analysis, handled: Callable[[fx.Node], bool], settle: Callable[[fx.Node], bool] | None = None
) -> None:
    """Fills `analysis.states`, user node by user node in the order of execution.

    `handled(user_node)`: a rule will make this node's results LOCAL, given LOCAL or WINDOW inputs.
    `settle(user_node)`: asked for each node whose results are MIXED; True if it has just been found to be the
    end of a recognised region, so that its results are LOCAL from here on.
    """
    for user_node in analysis.gm.graph.nodes:
        group = analysis.shadow.groups.get(user_node, [])
        if not group:
            continue
        inside = set(group)
        outer = [s for n in group for s in n.all_input_nodes if s not in inside]
        inputs_mixed = any(analysis.state(s) is State.MIXED for s in outer)
        mixing = any(analysis.mixes(n) for n in group)
        _note_sums(analysis, group)
        if not inputs_mixed and mixing and handled(user_node):
            mixing = False
        elif mixing or inputs_mixed:
            _taint(analysis, group)
            if settle is not None and settle(user_node):
                inputs_mixed = mixing = False
                analysis.from_sums.difference_update(group)
            else:
                continue
        for node in group:
            analysis.states[node] = State.WINDOW if analysis.is_window(node) else State.LOCAL


def _note_sums(analysis: Analysis, group: list[fx.Node]) -> None:
    for node in group:
        kinds = {action.kind for action in analysis.own_mixing(node)}
        is_sum = bool(kinds) and kinds <= {"reduce", "contract"} and not analysis.track.sequence_dims(node)
        if is_sum or any(source in analysis.from_sums for source in node.all_input_nodes):
            analysis.from_sums.add(node)


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not any(size_of(size) == 0 for size in value.shape)


_aten = torch.ops.aten

SHAPED_LIKE = frozenset(
    {
        _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default,
        _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default,
    }
)  # fmt: skip
"""Factories that take nothing but a shape or a dtype from the tensor they are given: constants."""

_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)


def _taint(analysis: Analysis, group: list[fx.Node]) -> None:
    """Within a group only what follows a mixing node is MIXED."""
    for node in group:
        mixed = analysis.mixes(node) or any(analysis.state(s) is State.MIXED for s in node.all_input_nodes)
        if mixed and node.target not in _SIZES:  # the size of a mixed value is no mixed value
            analysis.states[node] = State.MIXED
        else:
            analysis.states[node] = State.WINDOW if analysis.is_window(node) else State.LOCAL
