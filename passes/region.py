"""A region: a part of the shadow graph with inputs, one output, and a meaning that can be computed.

A candidate for recognition is the part of the graph between values that are local to a position and one MIXED
value. `cut_region` finds it; `evaluate` runs it in float64 on the CPU on any values and at any sizes: every
dimension is known by its axis, so a region that was traced with one length can be run with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis, State
from zeco_compile.passes.axes import Atom, Dim
from zeco_compile.passes.masks import Buffer, TakenValues, causal_mask, taken_values
from zeco_compile.passes.schema import argument, is_random, operand, shape
from zeco_compile.passes.sizes import Size, same_size

aten = torch.ops.aten


SPREADS = "zeco_spreads"
"""Mark of a node of the user's graph that makes more of a token than the token has: an outer product of k and v. It is
computed inside of a step so that it need not be held for all of them."""

INSIDE = "zeco_inside_step"
"""Mark of a node of the user's graph with which no region should end: it computes the next state, or is larger than
what a token has."""


class CannotEvaluate(Exception):
    """The region cannot be run at the sizes asked for; the message says why."""


@dataclass(frozen=True)
class Region:
    """`output` computed from `inputs` by `interior` (in order, `output` last)."""

    output: fx.Node
    inputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    user_nodes: tuple[fx.Node, ...]
    """The nodes of the user's graph that the interior belongs to."""

    masks: tuple[Buffer, ...] = ()
    """Buffers whose values the region takes as they are."""

    masks_at: tuple[fx.Node, ...] = ()
    """Their placeholders in the shadow graph; not among `inputs`."""

    initial_state: fx.Node | None = None
    """Where the region makes zeros for a state that it carries from step to step, or the input that it begins with;
    with `final_state`, its value after the last step, the region can be run piece by piece."""
    final_state: fx.Node | None = None

    carries: tuple[Carry, ...] = ()
    """What a scan carries; then the region is run step by step."""

    @cached_property
    def last_read(self) -> tuple[tuple[fx.Node, ...], ...]:
        """For each node of the interior the values that nothing reads after it."""
        last = {source: node for node in self.interior for source in node.all_input_nodes}
        kept = {self.output, self.initial_state, self.final_state, *self.inputs, *self.masks_at}
        kept.update(node for each in self.carries for node in (each.after, each.last))
        return tuple(
            tuple(s for s in node.all_input_nodes if last[s] is node and s not in kept)
            for node in self.interior
        )


@dataclass(frozen=True)
class Carry:
    """What the steps of a scan find (`before`), what they leave behind (`after`), [T, ...] both, and what the last one
    leaves behind (`last`), if it is read."""

    before: fx.Node
    after: fx.Node
    last: fx.Node | None

    @staticmethod
    def of(before: fx.Node) -> Carry:
        (after,) = (user for user in before.users if user.target is torch.ops.zeco.carry_after.default)
        return Carry(
            before, after, next((user for user in after.users if user.target is aten.select.int), None)
        )


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node is computed from. What a step finds is what was there at first, and what the steps leave behind."""
    if node.target is torch.ops.zeco.carry_before.default:
        return [operand(node, 0), Carry.of(node).after]
    return node.all_input_nodes


def cut_region(
    analysis: Analysis, output: fx.Node, limit: int, *, beyond_sums: bool = False
) -> Region | None:
    """The region that ends in `output` and begins at LOCAL values; None with more than `limit` inputs. It goes through
    sums over the sequence that are LOCAL by themselves if `beyond_sums`."""
    origin = analysis.shadow.origin
    inputs: dict[fx.Node, None] = {}
    interior: set[fx.Node] = set()
    masks: dict[fx.Node, Buffer] = {}
    known: dict[fx.Node, bool] = {}
    stack = [output]
    while stack:
        node = stack.pop()
        if node in interior:
            continue
        interior.add(node)
        if node.target in SHAPED_LIKE:
            continue  # a constant of a known shape, whatever it is like
        for source in _sources(node):
            if not isinstance(source.meta.get("val"), torch.Tensor | list | tuple):
                continue  # a size: computed from the sizes asked for
            # What several ops make alike on their way is one value of the shadow, and none of the user's graph.
            outside = source.op != "call_function" or (
                origin.get(source) is not origin.get(node) and _is_held(analysis, source)
            )
            local = analysis.state(source) is State.LOCAL and not analysis.is_constant(source)
            local = local and not (beyond_sums and source in analysis.from_sums)
            local = local and not _spreads(analysis, source)
            if outside and local and not _made_from_zeros(analysis, source, known):
                if _read_by_position(analysis, node) and (mask := causal_mask(analysis, source)) is not None:
                    masks[source] = mask
                    continue
                inputs[source] = None
                if len(inputs) > limit:
                    return None
            elif source.op == "call_function":
                stack.append(source)
            else:
                return None
    carries = [Carry.of(n) for n in interior if n.target is torch.ops.zeco.carry_before.default]
    interior.update(carry.last for carry in carries if carry.last is not None)
    ordered = tuple(n for n in analysis.shadow.graph.nodes if n in interior)
    if any(mask in inputs for mask in masks):
        return None  # read in two ways
    user_nodes = _user_nodes(analysis, ordered)
    read = [carry.last for carry in carries if carry.last is not None]
    return Region(
        output,
        tuple(inputs),
        ordered,
        user_nodes,
        tuple(masks.values()),
        tuple(masks),
        final_state=read[0] if len(read) == 1 else None,
        carries=tuple(carries),
    )


def _spreads(analysis: Analysis, node: fx.Node) -> bool:
    user_node = analysis.user_node(node)
    return user_node is not None and bool(user_node.meta.get(SPREADS))


_SAME_VALUES = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
        aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.squeeze.default, aten.expand.default, aten.clone.default,
    }
)  # fmt: skip


def with_common_sources(region: Region, analysis: Analysis, *, through: str) -> Region:
    """The region from further up, where several of its inputs come from one value: they are no inputs that vary each
    by itself. `through` "views" of a value, as `a` and `a[..., None]` are, or through any "functions" of it
    alone, as `f` and `1 - f`; through "nothing", they stay. An input whose rows are taken apart into chunks gives way
    to what it is a view of."""
    ways = {node: _way_up(analysis, node, through) for node in region.inputs}
    inputs: dict[fx.Node, None] = {}
    passed: set[fx.Node] = set()
    for node, way in ways.items():
        others = {each for other, theirs in ways.items() if other is not node for each in theirs}
        shared = [] if through == "nothing" else [i for i, each in enumerate(way) if each in others]
        at = next((i for i in shared if _is_held(analysis, way[i])), 0)
        at += _before_chunks(analysis, way[at:])
        passed.update(way[:at])
        inputs[way[at]] = None
    interior = {*region.interior, *passed}
    for node in [each for each in inputs if each in interior]:
        interior.discard(node)  # where one way goes on through the end of another
    ordered = tuple(n for n in analysis.shadow.graph.nodes if n in interior)
    return replace(region, inputs=tuple(inputs), interior=ordered, user_nodes=_user_nodes(analysis, ordered))


def _user_nodes(analysis: Analysis, interior: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    origin = analysis.shadow.origin
    return tuple(dict.fromkeys(origin[n] for n in interior if n in origin))


def _way_up(analysis: Analysis, node: fx.Node, through: str) -> list[fx.Node]:
    """The value and what it was computed from, as long as that is one local value and no other positions are seen."""
    way = [node]
    while way[-1].op == "call_function" and not analysis.mixes(way[-1]):
        sources = [s for s in way[-1].all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)]
        if len(sources) != 1 or analysis.state(sources[0]) is not State.LOCAL or is_random(way[-1]):
            break
        if through != "functions" and not _keeps_values(way[-1], sources[0]):
            break
        way.append(sources[0])
    return way


def from_undecayed_state(region: Region, analysis: Analysis) -> Region:
    """The region from a state that it begins with on, where it has begun with that state's product with its decay: both
    are the same for all positions."""
    inputs, interior = list(region.inputs), set(region.interior)
    for at, node in enumerate(inputs):
        while node.target is aten.mul.Tensor and not analysis.track.sequence_dims(node):
            others = [source for source in _tensors(node) if source not in inputs]
            if len(others) != 1 or len(node.all_input_nodes) != 2 or not _is_held(analysis, others[0]):
                break
            interior.add(node)
            (node,) = others
        inputs[at] = node
    ordered = tuple(n for n in analysis.shadow.graph.nodes if n in interior)
    return replace(region, inputs=tuple(inputs), interior=ordered, user_nodes=_user_nodes(analysis, ordered))


def with_taken_buffers(region: Region, analysis: Analysis) -> Region:
    """The region with the values of buffers as they are, where its inputs are buffers, or computed from nothing else:
    the decays of lightning attention."""
    taken = dict(zip(region.masks_at, region.masks, strict=True))
    inputs: list[fx.Node] = []
    interior = set(region.interior)
    for node in region.inputs:
        way = _from_buffers(analysis, node)
        if way is None:
            inputs.append(node)
            continue
        passed, buffers = way
        interior |= passed
        taken |= buffers
    ordered = tuple(n for n in analysis.shadow.graph.nodes if n in interior)
    return replace(
        region,
        inputs=tuple(inputs),
        interior=ordered,
        user_nodes=_user_nodes(analysis, ordered),
        masks=tuple(taken.values()),
        masks_at=tuple(taken),
    )


def _from_buffers(analysis: Analysis, node: fx.Node) -> tuple[set[fx.Node], dict[fx.Node, Buffer]] | None:
    """What a value without a sequence was computed by, and the buffers it was computed from, if from nothing else."""
    passed: set[fx.Node] = set()
    buffers: dict[fx.Node, Buffer] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.op == "placeholder":
            taken = taken_values(analysis, current)
            if taken is None:
                return None
            buffers[current] = taken
        elif current.op != "call_function" or is_random(current) or analysis.mixes(current):
            return None
        elif current not in passed:
            passed.add(current)
            stack += [
                s
                for s in current.all_input_nodes
                if isinstance(s.meta.get("val"), torch.Tensor | list | tuple)
            ]
    return (passed, buffers) if buffers else None


def tolerance(region: Region) -> float:
    """The relative difference in float64 up to which the region is what it should be: buffers of decays in float32
    were rounded when they were made, where the result is float32 too."""
    rounded = any(
        isinstance(each, TakenValues) and each.values.dtype == torch.float32 for each in region.masks
    )
    return _ROUNDED if rounded and region.output.meta["val"].dtype == torch.float32 else TOLERANCE


TOLERANCE = 1e-9
"""Relative difference in float64 up to which two computations are the same."""

_ROUNDED = 32 * torch.finfo(torch.float32).eps


def _keeps_values(node: fx.Node, source: fx.Node) -> bool:
    if node.target is aten.constant_pad_nd.default:  # by nothing
        sizes = zip(shape(node), shape(source), strict=True)
        return all(same_size(a, b) for a, b in sizes)
    return node.target in _SAME_VALUES


def _before_chunks(analysis: Analysis, way: Sequence[fx.Node]) -> int:
    """Where on the way up from a value to stop: at itself, unless its rows are taken apart into chunks, or folded into
    one dimension with others."""
    chunked = len(analysis.track.sequence_dims(way[0])) > 1 or row_dims(analysis, way[0]) is None
    for at, node in enumerate(way if chunked else ()):
        padded = node.target is aten.constant_pad_nd.default and at + 1 < len(way)
        if len(row_dims(analysis, node) or ()) == 1 and _is_held(analysis, node) and not padded:
            return at
    return 0


def _is_held(analysis: Analysis, node: fx.Node) -> bool:
    """Some node of the user's graph has had this value."""
    origin = analysis.shadow.origin.get(node)
    return node.op == "placeholder" or (origin is not None and node in analysis.shadow.tensors_made(origin))


def _read_by_position(analysis: Analysis, reader: fx.Node) -> bool:
    return analysis.is_table_lookup(reader) or analysis.is_pair(reader)


_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _made_from_zeros(analysis: Analysis, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """A state before the first step, on which the step's decay has worked already: `gamma * zeros`."""
    stack = [node]
    while stack:
        at = stack[-1]
        sources = at.all_input_nodes
        if at in known:
            stack.pop()
        elif at.op != "call_function" or analysis.track.sequence_dims(at):
            known[at] = False
        elif analysis.is_constant(at):
            known[at] = _is_zeros(at)
        elif unknown := [source for source in sources if source not in known]:
            stack += unknown
        else:
            known[at] = any(known[source] for source in sources)
    return known[node] and not analysis.is_constant(node)


def _is_zeros(node: fx.Node) -> bool:
    """Zeros from a factory, or a copy of such."""
    while node.target is aten.clone.default:
        (node,) = node.all_input_nodes
    return node.target in _ZEROS or (node.target is aten.full.default and bool(node.args[1] == 0))


def _makes_zeros(node: fx.Node) -> bool:
    return node.target is not aten.clone.default and _is_zeros(node)


def carrying(region: Region, analysis: Analysis) -> Iterator[Region]:
    """The region with each way to read it as a loop that carries a state.

    The state is made of zeros, without a sequence axis; what it has become after the last step is one of the last
    values with the same axes that were computed from it. Which one, a run of two pieces will tell. It may also begin
    with an input, of which nothing need be known unless somebody else reads what it has become.
    """
    track = analysis.track
    inside = set(region.interior)
    for node in (*region.interior, *region.inputs):
        given = node in region.inputs
        if track.sequence_dims(node) or not (given or _makes_zeros(node)):
            continue
        if not is_inexact(node):
            continue
        following = {node}
        dims = [track.axes.flat(d) for d in track.dims(node)]
        alike = []
        for other in region.interior:
            if other not in following and any(s in following for s in other.all_input_nodes):
                following.add(other)
                value = other.meta.get("val")
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim() == len(dims)
                    and other is not region.output
                    and not _is_its_operand(other)
                    and not (given and inside.issuperset(other.users))
                    and [track.axes.flat(d) for d in track.dims(other)] == dims
                ):
                    alike.append(other)
        for last in reversed(alike[-_LAST_VALUES:]):
            yield replace(region, initial_state=node, final_state=last)


_LAST_VALUES = 6


def carrying_beyond(region: Region, analysis: Analysis) -> Iterator[Region]:
    """The region with each state that it carries and that its output does not need any more: what a loop over chunks,
    or one that reads before it writes, has written last. `analysis` is that of the whole graph.

    Such a value is computed from what the region has, its output excepted, and from nothing else.
    """
    track = analysis.track
    before = {*region.interior, *region.inputs, *region.masks_at} - {region.output}
    made: dict[fx.Node, None] = {}
    of_tokens = {node for node in region.inputs if track.sequence_dims(node)}
    for node in analysis.shadow.graph.nodes:
        if node.op != "call_function" or node is region.output or node in region.inputs or is_random(node):
            continue
        sources = [] if node.target in SHAPED_LIKE else _tensors(node)
        if node not in before and all(source in before or source in made for source in sources):
            made[node] = None
        if (node in before or node in made) and not of_tokens.isdisjoint(sources):
            of_tokens.add(node)
    for first in (*region.interior, *region.inputs):
        given = first in region.inputs
        if track.sequence_dims(first) or not (given or _makes_zeros(first)):
            continue
        if not is_inexact(first):
            continue
        dims = [track.axes.flat(d) for d in track.dims(first)]
        following = {first}
        for node in region.interior:
            if node is not region.output and not following.isdisjoint(node.all_input_nodes):
                following.add(node)
        alike = []
        for node in made:
            if following.isdisjoint(node.all_input_nodes):
                continue
            following.add(node)
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dim() != len(dims) or _is_its_operand(node):
                continue
            if node in of_tokens and [track.axes.flat(d) for d in track.dims(node)] == dims:
                alike.append(node)
        for last in reversed(alike[:_LAST_VALUES]):
            needed = {last}
            for node in reversed(made):
                if node in needed and node.target not in SHAPED_LIKE:
                    needed.update(source for source in _tensors(node) if source in made)
            inside = needed.union(region.interior)
            ordered = tuple(n for n in analysis.shadow.graph.nodes if n in inside)
            yield replace(
                region,
                interior=ordered,
                user_nodes=_user_nodes(analysis, ordered),
                initial_state=first,
                final_state=last,
            )


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor | list | tuple)]


def same_value(node: fx.Node) -> fx.Node:
    """The value that this one is under another name."""
    while _is_its_operand(node):
        node = operand(node, 0)
    return node


def _is_its_operand(node: fx.Node) -> bool:
    """A value in the shape it has already, as a matmul or an einsum makes of its operands."""
    copies = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
    if node.target is aten.permute.default:
        order = [dim % len(shape(node)) for dim in node.args[1]]  # type: ignore[union-attr, operator]
        return order == list(range(len(order)))
    if node.target not in (*copies, aten.clone.default):
        return False
    sizes, others = shape(node), shape(operand(node, 0))
    return len(sizes) == len(others) and all(map(same_size, sizes, others))


# --------------------------------------------------------------------------------------------------- evaluation


@dataclass
class Sizes:
    """The sizes to run at: the length, and other sizes for some axes."""

    analysis: Analysis
    length: int
    other: Mapping[Atom, int] = field(default_factory=dict)
    ops: dict[fx.Node, _Op] = field(default_factory=dict, repr=False, compare=False)
    """What has been run at these sizes, ready to be run on other values: a region is probed hundreds of times."""

    @cached_property
    def of_a_piece(self) -> Sizes:
        """The same with the length that was traced."""
        return Sizes(self.analysis, self.analysis.length, self.other)

    def of_atom(self, atom: Atom) -> int:
        if atom in self.other:
            return self.other[atom]
        return self.of_size(atom.size) if not atom.sequence else self._sequence(atom)

    def _sequence(self, atom: Atom) -> int:
        length = self.analysis.length
        if isinstance(length, int):
            if isinstance(atom.size, int) and atom.size != length and atom.window in (None, (0, 0)):
                return atom.size  # a part of the sequence taken apart
            return self.length + (int(atom.size) - length if atom.window else 0)
        return self.of_size(atom.size)

    def of_size(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        value = sympy.sympify(size).subs(self.substitutions)
        if not value.is_Integer:
            raise CannotEvaluate(f"the size {size} depends on more than the length")
        return int(value)

    @cached_property
    def substitutions(self) -> dict[Any, int]:
        length = self.analysis.length
        out: dict[Any, int] = {} if isinstance(length, int) else {length: self.length}
        for each in self.analysis.inputs:  # other symbols (a dynamic batch) as they are at hand
            node = self.analysis.shadow.inputs.get(each.node)
            value = None if node is None else node.meta["val"]
            if isinstance(value, torch.Tensor):
                real = self.analysis.example_inputs[each.index]
                for fake_size, size in zip(value.shape, real.shape, strict=True):
                    if isinstance(fake_size, torch.SymInt) and fake_size.node.expr.is_Symbol:
                        out.setdefault(fake_size.node.expr, int(size))
        return out

    def of_dim(self, dim: Dim) -> int:
        axes = self.analysis.track.axes
        product, flat, rows = 1, axes.flat(dim), axes.flat((axes.sequence,))
        while flat:
            # chunks of a constant length, put together
            together = len(rows) > 1 and flat[: len(rows)] == rows
            product *= self.length if together else self.of_atom(flat[0])
            flat = flat[len(rows) if together else 1 :]
        return product

    def shape(self, node: fx.Node) -> list[int]:
        return [self.of_dim(dim) for dim in self.analysis.track.dims(node)]

    @property
    def as_traced(self) -> bool:
        return not self.other and self.length == self.analysis.length


def piecewise(region: Region, analysis: Analysis) -> bool:
    """The region steps through the sequence, or takes it apart into chunks: it can be run at multiples of its length
    only, by carrying on."""
    if not isinstance(analysis.length, int) or region.carries:
        return False
    axes = analysis.track.axes
    return len(axes.flat((axes.sequence,))) > 1 or any(
        action.kind in ("select", "slice", "part", "scatter", "cat", "split")
        for node in region.interior
        for action in analysis.track.acts_along_sequence(node)
    )


def evaluate(region: Region, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The region's output in float64 for float64 `values` of its inputs. Raises CannotEvaluate."""
    analysis = sizes.analysis
    if region.carries:
        return _step_by_step(region, values, sizes)[0]
    if not piecewise(region, analysis):
        return _run(region, values, sizes, {})[region.output]
    step = analysis.length
    pieces, rest = divmod(sizes.length, step)
    if rest or (pieces > 1 and region.final_state is None):
        raise CannotEvaluate("a loop over the sequence can be run at multiples of its length only")
    if pieces == 1:
        return _run(region, values, sizes, {})[region.output]
    if any(
        len(row_dims(analysis, node) or (0, 0)) > 1 for node in values if analysis.track.sequence_dims(node)
    ):
        raise CannotEvaluate("a value whose rows are taken apart into chunks cannot be cut into pieces")
    local = sizes.of_a_piece
    carried: dict[fx.Node, torch.Tensor] = {}
    outputs = []
    for piece in range(pieces):
        part = {n: _rows(analysis, n, v, piece * step, step) for n, v in values.items()}
        env = _run(region, {**part, **carried}, local, carried)
        outputs.append(env[region.output])
        if region.initial_state is not None and region.final_state is not None:
            carried = {region.initial_state: env[region.final_state]}
    (along,) = analysis.track.sequence_dims(region.output)
    return torch.cat(outputs, along)


def final_state_value(region: Region, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The region's final state in float64, at the length that was traced."""
    assert region.final_state is not None
    if region.carries:
        return _step_by_step(region, values, sizes)[1][region.final_state]
    value: torch.Tensor = _run(region, values, sizes, {})[region.final_state]
    return value


def _step_by_step(
    region: Region, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes
) -> tuple[torch.Tensor, dict[fx.Node, torch.Tensor]]:
    """The output of a region with carries, and what the last step leaves behind, by the nodes that read it."""
    analysis = sizes.analysis
    known = {node for each in region.carries for node in (each.before, each.last)}
    for node in region.interior:
        if node not in known and (analysis.mixes(node) or analysis.track.acts_along_sequence(node)):
            raise CannotEvaluate(f"{analysis.described(node)}, beside the scan, looks at other positions")
    for node in values:
        if analysis.track.sequence_dims(node) and len(row_dims(analysis, node) or ()) != 1:
            raise CannotEvaluate(
                "a value whose rows are no dimension of their own cannot be taken step by step"
            )
    (along,) = analysis.track.sequence_dims(region.output)
    one = Sizes(analysis, 1, sizes.other)
    carried: dict[fx.Node, torch.Tensor] = {}
    outputs = []
    for step in range(sizes.length):
        env = _run(region, {n: _rows(analysis, n, v, step, 1) for n, v in values.items()}, one, carried)
        outputs.append(env[region.output])
        carried = {each.before: env[each.after] for each in region.carries}
    last = {each.last: env[each.last] for each in region.carries if each.last is not None}
    return torch.cat(outputs, along), last


def rounds(region: Region, analysis: Analysis, node: fx.Node) -> bool:
    """Whether a value of the interior loses digits in its own precision: a constant that is exact in it does not
    (a mask of ones), one that is not does, and so does everything that is computed from inputs."""
    if not analysis.is_constant(node):
        return True
    needed = {node}
    for other in reversed(region.interior):
        if other in needed:
            needed.update(other.all_input_nodes)
    interior = tuple(n for n in region.interior if n in needed)
    length = analysis.length if piecewise(region, analysis) else 7
    value = _run(Region(node, (), interior, ()), {}, Sizes(analysis, length), {})[node]
    return not bool((value.to(node.meta["val"].dtype).double() == value).all())


def row_dims(analysis: Analysis, node: fx.Node) -> list[int] | None:
    """The dimensions of a value that are the rows of the sequence together, chunks and rows of a chunk for two of
    them; none if it has no rows; None where they are not in order, or not alone in their dimensions."""
    axes, dims = analysis.track.axes, analysis.track.dims(node)
    along = analysis.track.sequence_dims(node)
    together = tuple(atom for i in along for atom in axes.flat(dims[i]))
    return along if not along or axes.is_whole_sequence(together) else None


def as_rows(value: torch.Tensor, along: Sequence[int]) -> torch.Tensor:
    """[T, ...], with the dimensions `along` (see `row_dims`) as one, at the front."""
    return value.movedim(tuple(along), tuple(range(len(along)))).flatten(0, len(along) - 1)


def from_rows(rows: torch.Tensor, along: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """What `as_rows(value, along)` was made from, `shape` being the value's."""
    split = rows.unflatten(0, [shape[i] for i in along])
    return split.movedim(tuple(range(len(along))), tuple(along))


def _rows(analysis: Analysis, node: fx.Node, value: torch.Tensor, start: int, count: int) -> torch.Tensor:
    for dim in analysis.track.sequence_dims(node):
        value = value.narrow(dim, start, count)
    return value


def _run(
    region: Region,
    values: Mapping[fx.Node, torch.Tensor],
    sizes: Sizes,
    given: Mapping[fx.Node, torch.Tensor],
) -> dict[fx.Node, Any]:
    env: dict[fx.Node, Any] = dict(values)
    for node, mask in zip(region.masks_at, region.masks, strict=True):
        data = sizes.analysis.example_inputs[mask.index].detach().cpu()
        env[node] = data.to(widest(data.dtype))
    ops = sizes.ops
    with torch.no_grad():
        for node, unused in zip(region.interior, region.last_read, strict=True):
            if node in given:
                env[node] = given[node]
            else:
                op = ops.get(node)
                if op is None:
                    op = ops[node] = _prepared(node, env, sizes)
                env[node] = op(env)
            for source in unused:
                env.pop(source, None)
    return env


def widest(dtype: torch.dtype) -> torch.dtype:
    """What a region is evaluated in."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def is_inexact(node: fx.Node) -> bool:
    """It holds real or complex numbers."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype.is_floating_point or dtype.is_complex


_SIZED = {
    aten.view.default: 1, aten._unsafe_view.default: 1, aten.reshape.default: 1, aten.expand.default: 1,
    aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
    aten.empty.memory_format: 0, aten.new_zeros.default: 1, aten.new_ones.default: 1, aten.new_full.default: 1,
}  # fmt: skip


_Op = Callable[[Mapping[fx.Node, Any]], Any]
"""One op of a region at certain sizes: its result from the values of the nodes before it."""


def _prepared(node: fx.Node, env: Mapping[fx.Node, Any], sizes: Sizes) -> _Op:
    """The op with all numbers as they are at these sizes. What has a value in `env` is left open."""

    def number_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return widest(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return _number(leaf, sizes) if isinstance(leaf, fx.Node) and leaf not in env else leaf

    target = node.target
    if target is torch.ops.zeco.carry_before.default:
        found = operand(node, 0)
        return lambda env: env[found].unsqueeze(0)  # there is one step, the first
    if target in SHAPED_LIKE:
        return _shaped_like(node, sizes)
    if is_random(node):
        raise CannotEvaluate(f"{target} is random")
    if _asks_other_ranks(target):
        raise CannotEvaluate(
            f"{target} computes with other ranks"
        )  # which are not asked while a graph is compiled
    args = list(pytree.tree_map(number_of, node.args))
    kwargs = dict(pytree.tree_map(number_of, node.kwargs))
    made = node.meta.get("val")
    makes_inexact = isinstance(made, torch.Tensor) and is_inexact(node)
    if isinstance(target, torch._ops.OpOverload):
        _at_sizes(node, args, kwargs, sizes)
        has_dtype = any(a.name == "dtype" for a in target._schema.arguments)
        default = isinstance(made, torch.Tensor) and kwargs.get("dtype") is None
        if has_dtype and default and not _open(args):  # made from nothing: its dtype was the default one
            kwargs["dtype"] = widest(made.dtype)  # type: ignore[union-attr]
        kwargs.pop("pin_memory", None)
    if target in (aten.view.default, aten._unsafe_view.default):
        target = aten.reshape.default  # the strides of the trace are not those of these values
    fill = _filling(args, kwargs)
    # all runs at these sizes have the types of the first
    of_integers = makes_inexact and _of_integers([env[operand] for operand in _open(args)])

    def op(env: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fill(env)
        if of_integers:
            # Whole numbers and a Python number, as in `gamma ** (i - j)`, would make the default dtype.
            args = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, args)
        try:
            return target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise CannotEvaluate(f"{sizes.analysis.described(node)} ({target}): {error}") from error

    return op


def _asks_other_ranks(target: Any) -> bool:
    """An op of ours that an earlier pass has put in: it would be a message to ranks that may not evaluate this."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "zeco":
        return False
    return any(argument_.name == "group" for argument_ in target._schema.arguments)


def _open(tree: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]


def _filling(
    args: list[Any], kwargs: dict[str, Any]
) -> Callable[[Mapping[fx.Node, Any]], tuple[list[Any], dict[str, Any]]]:
    """A function that puts values in place of nodes."""
    alone = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, fx.Node)]
    within = [(i, arg) for i, arg in enumerate(args) if not isinstance(arg, fx.Node) and _open(arg)]
    named = bool(_open(kwargs))

    def fill(env: Mapping[fx.Node, Any]) -> tuple[list[Any], dict[str, Any]]:
        filled = list(args)
        for i, node in alone:
            filled[i] = env[node]
        for i, tree in within:
            filled[i] = pytree.tree_map_only(fx.Node, env.__getitem__, tree)
        return filled, pytree.tree_map_only(fx.Node, env.__getitem__, kwargs) if named else kwargs

    return fill


def _of_integers(operands: Sequence[Any]) -> bool:
    """All tensors among the operands are of whole numbers, and there are some."""
    given = [a for a in operands if isinstance(a, torch.Tensor)]
    others = (a.dtype == torch.bool or a.dtype.is_floating_point or a.dtype.is_complex for a in given)
    return bool(given) and not any(others)


_FILLED_WITH = {
    aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip


def _shaped_like(node: fx.Node, sizes: Sizes) -> _Op:
    """What a factory makes, from the sizes alone. Memory that is not filled is NaN, so that it shows if read."""
    dtype = widest(node.meta["val"].dtype)
    shape = sizes.shape(node)
    value: Any
    if node.target in _FILLED_WITH:
        value = _FILLED_WITH[node.target]
    elif node.target in (aten.empty_like.default, aten.new_empty.default):
        value = float("nan") if is_inexact(node) else 0
    else:
        value = argument(node, "fill_value")
        value = _number(value, sizes) if isinstance(value, fx.Node) else value
    return lambda _: torch.full(shape, value, dtype=dtype)


def _at_sizes(node: fx.Node, args: list[Any], kwargs: dict[str, Any], sizes: Sizes) -> None:
    """Replaces sizes that the trace had by those asked for."""
    if sizes.as_traced:
        return
    target = node.target
    if target in _SIZED:
        args[_SIZED[target]] = sizes.shape(node)
    elif target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        count = sizes.shape(node)[0]
        start = args[0] if target is not aten.arange.default else 0
        step = args[2] if target is aten.arange.start_step and len(args) > 2 else 1
        end = start + step * count
        args[:] = [end] if target is aten.arange.default else [start, end, *args[2:]]
    elif target is aten.slice.Tensor and sizes.shape(node) == sizes.shape(node.args[0]):  # type: ignore[arg-type]
        args[1:] = []  # all rows, whatever the numbers were
    elif sizes.analysis.is_table_lookup(node) and isinstance(sizes.analysis.length, int):
        dim = argument(node, "dim", 0)
        start = argument(node, "start", 0) or 0
        args[1:] = [dim, start, start + sizes.shape(node)[dim]]


def _number(node: fx.Node, sizes: Sizes) -> Any:
    value = node.meta.get("val")
    if isinstance(value, int | float | bool):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        number = sympy.sympify(value.node.expr).subs(sizes.substitutions)
        if number.is_number:
            return int(number) if isinstance(value, torch.SymInt) else float(number)
    raise CannotEvaluate(f"the number {node} depends on more than the length")


def largest_constant(nodes: Iterable[fx.Node]) -> int:
    """The largest whole number written in the region outside of sizes: a band, a window, an offset."""
    largest = 0
    for node in nodes:
        if node.target in _SIZED or node.target is aten.slice.Tensor:
            continue
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
            if number and abs(leaf) < 2**20 and float(leaf).is_integer():
                largest = max(largest, abs(int(leaf)))
    return largest
