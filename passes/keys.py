"""Attention that is not linear: each rank's queries against the keys and values of all ranks.

Contract: `over_all_keys(analysis, user_node)` gives the plan for a node where such attention ends: a call of
`F.scaled_dot_product_attention`, or the product with the values (a sum, a maximum over the keys) in code that computes
scores and takes their softmax, or another function of them that is not linear, itself. None for everything else.
`softmax_over_keys` is the same for softmax alone, which is no linear attention however it is spelled.

A value with two axes along the sequence has one of the queries, the *rows*, which stay this rank's, and one of the
keys, the *columns*, which become those of the whole sequence. Which is which follows backwards from the result, whose
axis is that of the rows: an axis that has no part in it is one of columns. What is needed in both roles (positions,
compared with themselves) is computed twice. Along rows only what is done to each row alone is taken; along columns,
which are complete, anything. Values that are local to a position are gathered where they are columns, and what is made
from sizes alone, masks and positions, is made again for the rows of this rank and the columns of all.

Where the length is a constant in the trace, nothing tells a number that is the length, or comes from it, from one that
merely equals it. But another trace, of the whole sequence, has each op's numbers as they are there (second_look.py,
which refuses what is another program there): what is made for the whole sequence takes them from that.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis, State
from zeco_compile.passes.axes import Atom, Dim
from zeco_compile.passes.axis_rules import visit
from zeco_compile.passes.length import VALUES
from zeco_compile.passes.modes import reason_against, stops_gradient
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    call_arguments,
    current,
    single_output,
    substitute,
)
from zeco_compile.passes.schema import RESHAPES, argument, is_random, operand, shape, tensors
from zeco_compile.passes.sizes import same_size, size_of
from zeco_compile.passes.tracking import Tracking

log = logging.getLogger(__name__)

aten = torch.ops.aten
zeco = torch.ops.zeco

Role = Literal["row", "column"]
Roles = tuple[Role | None, ...]
"""For each dimension of a value: what its axis along the sequence is, None without one."""


class _Unfit(Exception):
    """Something in the region needs other rows, or is not followed; the message says what."""


def over_all_keys(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The plan for a node that ends attention; None where it does not, or where it is not followed."""
    return softmax_over_keys(analysis, user_node) or _plan(analysis, user_node, _nonlinear_in_scores)


def softmax_over_keys(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The same, of softmax attention only."""
    return _plan(analysis, user_node, _has_softmax)


def _plan(analysis: Analysis, user_node: fx.Node, kind: Callable[[Analysis, fx.Node], bool]) -> Plan | None:
    try:
        if user_node.target is torch.nn.functional.scaled_dot_product_attention:
            return _sdpa(analysis, user_node)
        return _written_out(analysis, user_node, kind)
    except _Unfit as why:
        log.debug("no attention ends at %s: %s", user_node, why)
        return None


# ---------------------------------------------------------------------------------------------------- the two ways


_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _sdpa(analysis: Analysis, user_node: fx.Node) -> Plan:
    given = call_arguments(user_node, _SDPA_NAMES)
    value_of = {n: analysis.shadow.reads.get((user_node, given[n])) for n in ("query", "key", "value")}
    query, key, value = (_is_value(value_of[n]) for n in ("query", "key", "value"))
    region = _Region(analysis, user_node)
    for name, node in (("query", query), ("key", key), ("value", value)):
        if analysis.track.sequence_dims(node) not in ([node.meta["val"].dim() - 2], []):
            raise _Unfit(f"the {name} has the sequence in another dimension")
        if analysis.is_window(node):
            raise _Unfit(f"the {name} has some rows of the sequence alone")
    if not analysis.track.sequence_dims(query):
        raise _Unfit("the query does not run along the sequence")
    parts = [region.need(query, _roles(analysis, query, "row"))]
    parts += [region.need(node, _roles(analysis, node, "column")) for node in (key, value)]
    causal = bool(given.get("is_causal", False))
    if causal and not analysis.track.sequence_dims(key):
        raise _Unfit("a causal mask against keys that are no positions")
    mask = given.get("attn_mask")
    if mask is not None:
        node = _is_value(analysis.shadow.reads.get((user_node, mask)))
        dims = analysis.track.sequence_dims(node)
        count = node.meta["val"].dim()
        roles: list[Role | None] = [None] * count
        for dim in dims:
            if dim < count - 2:
                raise _Unfit("the mask has the sequence in another dimension")
            roles[dim] = "row" if dim == count - 2 else "column"
        parts.append(region.need(node, tuple(roles)))

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        values = region.emit(emit, ranks, parts)
        arguments = dict(zip(("query", "key", "value", "attn_mask"), values, strict=False))
        if causal:
            length = region.size(emit, analysis.length)
            rows = _numbers(emit, length, query, offset=emit.call(operator.mul, length, ranks.rank))
            columns = _numbers(emit, emit.call(operator.mul, length, ranks.world_size), query)
            seen = emit.call(torch.ge, emit.call(aten.unsqueeze.default, rows, 1), columns)
            arguments["attn_mask"] = seen
        rest = {k: v for k, v in call_arguments(user_node, _SDPA_NAMES).items() if k in _SDPA_NAMES[4:]}
        new = emit.call(user_node.target, **arguments, **{**rest, "is_causal": False})
        substitute(user_node, new)

    return region.plan(apply)


def _numbers(emit: Emit, count: Any, like: fx.Node, offset: Any = 0) -> fx.Node:
    made = emit.call(torch.arange, count, device=like.meta["val"].device)
    return made if isinstance(offset, int) and offset == 0 else emit.call(torch.add, made, offset)


def _written_out(
    analysis: Analysis, user_node: fx.Node, kind: Callable[[Analysis, fx.Node], bool]
) -> Plan | None:
    output = single_output(analysis, user_node)
    if output is None:
        return None
    if len(analysis.track.sequence_dims(output)) != 1 or analysis.is_window(output):
        return None
    if not kind(analysis, output):
        return None
    region = _Region(analysis, user_node, _following(analysis, _computed_from_pairs(analysis, output)))
    part = region.need(output, _roles(analysis, output, "row"))
    if not region.gathered:
        return None

    def apply(ranks: Ranks) -> None:
        (new,) = region.emit(Emit(user_node, after=False), ranks, [part])
        substitute(user_node, new)

    return region.plan(apply)


_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)


def _has_softmax(analysis: Analysis, output: fx.Node) -> bool:
    """There is one between the output and values that are local to a position."""
    return any(node.target in _SOFTMAX for node in _computed_from_pairs(analysis, output))


def _computed_from_pairs(analysis: Analysis, output: fx.Node) -> list[fx.Node]:
    """What is between the output and values that are local to a position, in order."""
    stack, seen = [output], {output}
    while stack:
        for source in stack.pop().all_input_nodes:
            if analysis.state(source) is State.MIXED and source not in seen:
                seen.add(source)
                stack.append(source)
    return [node for node in analysis.shadow.graph.nodes if node in seen]


def _following(analysis: Analysis, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them."""
    found = set(nodes)
    for node in analysis.shadow.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mul.Tensor)


def _nonlinear_in_scores(analysis: Analysis, output: fx.Node) -> bool:
    """Something that is not linear is done to products of two values of positions each, pair by pair."""
    scores = set[fx.Node]()
    for node in _computed_from_pairs(analysis, output):
        sources = tensors(node)
        if not scores.isdisjoint(sources):
            if any(analysis.is_pair(n) for n in sources if n in scores) and not _is_linear_in(node, scores):
                return True
            scores.add(node)
            continue
        of_positions = len(sources) > 1 and not any(map(analysis.is_constant, sources))
        if of_positions and node.target in _PRODUCTS and analysis.is_pair(node):
            scores.add(node)
    return False


def _is_linear_in(node: fx.Node, scores: Collection[fx.Node]) -> bool:
    """The op is linear in those of its operands, taken together."""
    of_scores = [
        place for place, value in enumerate(node.args) if isinstance(value, fx.Node) and value in scores
    ]
    if node.target in _PRODUCTS:
        return len(of_scores) == 1
    if node.target in (aten.div.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return of_scores == [0]
    if node.target is aten.where.self:
        return 0 not in of_scores
    return node.target in _LINEAR


def _is_value(node: Any) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise _Unfit("an argument is no single value")
    return node


def _roles(analysis: Analysis, node: fx.Node, role: Role) -> Roles:
    along = analysis.track.sequence_dims(node)
    return tuple(role if d in along else None for d in range(node.meta["val"].dim()))


# ------------------------------------------------------------------------------------------------------ the region


@dataclass(frozen=True)
class _Part:
    """A value in certain roles; or `whole`, as the unsharded model has it, wherever its axes are."""

    node: fx.Node
    roles: Roles
    whole: bool = False

    @property
    def columns(self) -> list[int]:
        return [d for d, role in enumerate(self.roles) if role == "column"]


Writing = Callable[["_Writer"], Any]
"""Writes a part into the graph, when everything that it is computed from is there."""


@dataclass
class _Region:
    """What is computed again, part by part in an order that serves; how each part is written into the graph."""

    analysis: Analysis
    user_node: fx.Node
    from_pairs: Collection[fx.Node] = frozenset()
    """Scores, and all that is computed from them, also where it is of one position each, and known already."""
    steps: dict[_Part, Writing] = field(default_factory=dict)
    sources: dict[_Part, Collection[_Part]] = field(default_factory=dict)
    gathered: list[_Part] = field(default_factory=list)
    leaves: set[_Part] = field(default_factory=set)
    _held: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = {node: i for i, node in enumerate(self.user_node.graph.nodes)}
        self._held = self.analysis.shadow.holders(order, order[self.user_node] - 1)

    def need(self, node: fx.Node, roles: Roles) -> _Part:
        """Adds the value in these roles, and what it is computed from. Raises _Unfit."""
        part = _Part(node, roles)
        if part not in self.steps:
            ways = [self._leaf, self._interior, self._cut_from_whole]
            if self.analysis.is_constant(node) and (any(roles) or node.target in SHAPED_LIKE):
                ways.insert(
                    0, self._interior
                )  # made again: there is no need to send it, or what it is shaped like
            elif node in self.from_pairs and not part.columns:
                ways = [
                    self._interior,
                    self._leaf,
                    self._cut_from_whole,
                ]  # from the very scores that are used here
            self.steps[part] = self._first(ways, part)
        return part

    def _first(self, ways: Sequence[Callable[[_Part], Writing | None]], part: _Part) -> Writing:
        """The first way that leads to the part; what the others have added on their way goes. Raises _Unfit."""
        reason = _Unfit(f"`{part.node}` is not followed")
        steps, gathered = len(self.steps), len(self.gathered)
        for way in ways:
            try:
                if (write := way(part)) is not None:
                    if way != self._cut_from_whole:
                        self._check_axes(part, made=way == self._interior)
                    self._check_sizes(part)
                    if way == self._leaf:
                        self.leaves.add(part)
                    return write
            except _Unfit as why:
                reason = why
            while len(self.steps) > steps:
                self.steps.popitem()
            del self.gathered[gathered:]
        raise reason

    def need_whole(self, node: fx.Node) -> _Part:
        """Adds a value as the unsharded model has it: a mask or positions, computed on every rank. Raises _Unfit."""
        part = _Part(node, (), whole=True)
        if part not in self.steps:
            write = self._whole(part)
            self._check_sizes(part)
            self.steps[part] = write
        return part

    # -------------------------------------------------------------------------------------------- values at hand

    def _leaf(self, part: _Part) -> Writing | None:
        node, analysis = part.node, self.analysis
        holder = self._held.get(node)
        if holder is None or analysis.state(node) is not State.LOCAL:
            return None
        if not part.columns:
            return lambda writer: current(holder)
        if len(part.columns) > 1 or self._spreads(node):
            return None
        (dim,) = part.columns
        if not analysis.track.axes.is_whole_sequence(analysis.track.dims(node)[dim]):
            return None
        self.gathered.append(part)

        def gather(writer: _Writer) -> fx.Node:
            group, world_size = writer.ranks.group, writer.ranks.world_size
            if (node, dim) not in analysis.gathered:  # or an attention before this one has gathered it
                analysis.gathered[node, dim] = writer.emit.call(
                    zeco.gather_sequence.default, current(holder), dim, group, world_size, True
                )
            return analysis.gathered[node, dim]

        return gather

    def _spreads(self, node: fx.Node) -> bool:
        """Keys that are repeated for several heads are sent once."""
        size = node.meta["val"].numel()
        while node.target in (*RESHAPES, *_MOVES, aten.expand.default, aten.clone.default):
            node = operand(node, 0)
            if node not in self._held and node.op != "call_function":
                return False
            if self.analysis.state(node) is not State.LOCAL:
                return False
            smaller = sympy.sympify(size_of(size)) / sympy.sympify(size_of(node.meta["val"].numel()))
            if smaller.is_number and smaller > 1:
                return True
        return False

    # ------------------------------------------------------------------------------- masks and positions, as a whole

    def _cut_from_whole(self, part: _Part) -> Writing:
        """Numbers that need other rows (which document a token is in, counted from the first) are small: they are
        computed for the whole sequence, and this rank takes its rows."""
        rows = [d for d, role in enumerate(part.roles) if role is not None]
        if len(rows) > 1:
            raise _Unfit(f"`{part.node}` has two axes along the sequence")
        whole = self.need_whole(part.node)
        if part.columns or not rows:
            return lambda writer: writer.env[whole]
        if not same_size(size_of(part.node.meta["val"].shape[rows[0]]), self.analysis.length):
            raise _Unfit(f"`{part.node}` has the sequence folded into another axis")

        def cut(writer: _Writer) -> fx.Node:
            length = writer.length()
            start = writer.emit.call(operator.mul, length, writer.ranks.rank)
            return writer.emit.call(aten.narrow.default, writer.env[whole], rows[0], start, length)

        return cut

    def _whole(self, part: _Part) -> Writing:
        node, analysis = part.node, self.analysis
        made = node.meta.get("val")
        along = analysis.track.sequence_dims(node)
        holder = self._held.get(node)
        local = holder is not None and analysis.state(node) is State.LOCAL and not along
        # with a constant length, an axis of constants may be the sequence and not be known as it
        if (
            local
            and not self._grows(node)
            and not (isinstance(analysis.length, int) and analysis.is_constant(node))
        ):
            return lambda writer: current(holder)  # type: ignore[arg-type]
        if not isinstance(made, torch.Tensor) or (
            made.dtype.is_floating_point and not analysis.is_constant(node)
        ):
            raise _Unfit(f"`{node}` is no mask and no position")
        if holder is not None and analysis.state(node) is State.LOCAL and not analysis.is_constant(node):
            columns = self.need(node, tuple("column" if d in along else None for d in range(made.dim())))
            return lambda writer: writer.env[columns]
        if node.op != "call_function" or is_random(node):
            raise _Unfit(f"`{node}` is not followed")
        sources = {n: self.need_whole(n) for n in tensors(node)}

        def compute(writer: _Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            target = aten.reshape.default if node.target in RESHAPES else node.target
            return writer.emit.call(target, *args, **kwargs)

        return compute

    # --------------------------------------------------------------------------------------------- values computed

    def _interior(self, part: _Part) -> Writing:
        node, target = part.node, part.node.target
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            raise _Unfit(f"`{node}` is not followed")
        if target is operator.getitem:
            return self._result(part)
        if is_random(node):
            raise _Unfit(f"`{target}` is random")
        if target in _RANGES:
            return self._range(part)
        if target in _FILLED:
            return self._filled(part)
        if target in (aten.tril.default, aten.triu.default):
            return self._triangle(part)
        if self.analysis.is_table_lookup(node):
            return self._table(part)
        return self._computed(part)

    def _range(self, part: _Part) -> Writing:
        node = part.node
        (role,) = part.roles
        start: Any = 0 if node.target is aten.arange.default else node.args[0]
        step: Any = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
        if not isinstance(start, int | float) or not isinstance(step, int | float):
            raise _Unfit("a range that begins at a number which is computed")
        made = node.meta["val"]

        def write(writer: _Writer) -> fx.Node:
            count = writer.size_of(part, 0)
            offset: Any = 0
            if role == "row":
                offset = writer.emit.call(operator.mul, count, writer.ranks.rank)
            x = writer.emit.call(torch.arange, count, device=made.device)
            for function, number in ((torch.add, offset), (torch.mul, step), (torch.add, start)):
                neutral = number == (1 if function is torch.mul else 0) if isinstance(number, int) else False
                x = x if neutral else writer.emit.call(function, x, number)
            return writer.emit.call(aten.to.dtype, x, made.dtype)

        return write

    def _filled(self, part: _Part) -> Writing:
        node = part.node
        if any(isinstance(n, fx.Node) for n in (*node.args[1:2], *node.kwargs.values()) if n is not None):
            raise _Unfit(f"`{node}` is filled with a number that is computed")
        made = node.meta["val"]
        value = _FILLED[node.target]
        if value is None:
            value = argument(node, "fill_value", None)
            if node.target is aten.scalar_tensor.default:
                value = argument(node, "s")
        if not isinstance(value, int | float | bool):
            raise _Unfit(f"`{node}` is filled with a number that is computed")

        def write(writer: _Writer) -> fx.Node:
            sizes = [writer.size_of(part, d) for d in range(made.dim())]
            return writer.emit.call(torch.full, sizes, value, dtype=made.dtype, device=made.device)

        return write

    def _triangle(self, part: _Part) -> Writing:
        node = part.node
        source = self.need(operand(node, 0), part.roles)
        diagonal = argument(node, "diagonal", 0)
        last = part.roles[-2:]
        if None in last or not isinstance(diagonal, int):
            if any(last):
                raise _Unfit("a triangle of one axis along the sequence and another one")
            return lambda writer: writer.emit.call(node.target, writer.env[source], diagonal)

        def write(writer: _Writer) -> fx.Node:
            shift: Any = diagonal
            if last[0] != last[1]:
                length = writer.length()
                passed = writer.emit.call(operator.mul, length, writer.ranks.rank)
                down = operator.add if last[0] == "row" else operator.sub
                shift = writer.emit.call(down, diagonal, passed)
            return writer.emit.call(node.target, writer.env[source], shift)

        return write

    def _table(self, part: _Part) -> Writing:
        """`table[:T]`: rows by position of something that every rank holds."""
        node = part.node
        dim = argument(node, "dim", 0) % node.meta["val"].dim()
        if argument(node, "start", 0) not in (0, None) or argument(node, "step", 1) != 1:
            raise _Unfit("rows of a table that do not begin with the first")
        symbols = sympy.sympify(self.analysis.length).free_symbols
        if sympy.sympify(shape(operand(node, 0))[dim]).free_symbols & symbols:
            raise _Unfit("rows of a table that is as long as this rank's slice, and longer")
        role = part.roles[dim]
        source = self.need(operand(node, 0), (*part.roles[:dim], None, *part.roles[dim + 1 :]))

        def write(writer: _Writer) -> fx.Node:
            count = writer.size_of(part, dim)
            start: Any = writer.emit.call(operator.mul, count, writer.ranks.rank) if role == "row" else 0
            return writer.emit.call(aten.narrow.default, writer.env[source], dim, start, count)

        return write

    def _needed(self, part: _Part) -> dict[fx.Node, _Part]:
        """The operands of an op in the roles in which it needs them. Raises _Unfit."""
        sources = {n: self.need(n, roles) for n, roles in self._roles_of_sources(part).items()}
        self.sources[part] = sources.values()
        if part.node.target not in (aten.mm.default, aten.bmm.default) and len(sources) > 1:
            self._check_scores(part)
        return sources

    def _check_scores(self, part: _Part) -> None:
        """Raises _Unfit where scores meet what is computed from the same ones, but of other rows: it would be computed
        in another way here, and `scores < threshold` is another mask if the rounding of the threshold is another."""
        seen, stack, roles_of = {part}, list(self.sources[part]), dict[fx.Node, Roles]()
        while stack:
            each = stack.pop()
            if each in seen or each.node not in self.from_pairs or self.analysis.is_constant(each.node):
                continue
            seen.add(each)
            if each.whole or each in self.leaves or roles_of.setdefault(each.node, each.roles) != each.roles:
                raise _Unfit(f"`{part.node}` combines scores with those of other rows")
            stack += self.sources.get(each, ())

    def _computed(self, part: _Part) -> Writing:
        node, target = part.node, part.node.target
        sources = self._needed(part)
        if target in (*RESHAPES, aten.expand.default):
            (source,) = sources.values()
            reshape = aten.expand.default if target is aten.expand.default else aten.reshape.default

            def write(writer: _Writer) -> fx.Node:
                sizes = [writer.size_of(part, d) for d in range(len(part.roles))]
                return writer.emit.call(reshape, writer.env[source], sizes)

            return write
        if target is aten.slice.Tensor:
            dim = argument(node, "dim", 0) % len(part.roles)
            if part.roles[dim] is not None:
                ((value, source),) = sources.items()
                if self.analysis.is_window(node) or self.analysis.is_window(value):
                    raise _Unfit(f"`{node}` cuts off rows of the sequence")
                return lambda writer: writer.env[source]

        def compute(writer: _Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            return writer.emit.call(target, *args, **kwargs)

        return compute

    def _result(self, part: _Part) -> Writing:
        """One of several results of an op: `scores.topk(8, -1).values`."""
        node, place = operand(part.node, 0), part.node.args[1]
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or is_random(node)
            or node.target.namespace == "zeco"  # made for the rows of a slice
        ):
            raise _Unfit(f"`{node}` has several results, and is not followed")
        sources = self._needed(part)

        def compute(writer: _Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            return writer.emit.call(operator.getitem, writer.emit.call(node.target, *args, **kwargs), place)

        return compute

    def _roles_of_sources(self, part: _Part) -> dict[fx.Node, Roles]:
        """The roles in which the op needs its operands, from the axes of the op by itself. Raises _Unfit."""
        node, analysis = part.node, self.analysis
        place = None
        if node.target is operator.getitem:
            node, place = operand(node, 0), node.args[1]
        alone = Tracking(analysis.length, analysis.track.axes.facts)
        given: dict[fx.Node, list[list[Atom]]] = {}
        for source in tensors(node):
            dims, along = [], []
            for dim in analysis.track.dims(source):
                atoms, rows = _apart(analysis, dim)
                dims.append(atoms)
                along.append(rows)
            alone.out(source, tuple(dims))
            given[source] = along
        visit(alone, node)
        if node in alone.problems or node in alone.misaligned:
            raise _Unfit(f"`{node}` ({node.target}) is not followed")
        role_of: dict[Atom, Role] = {}
        dims_made = alone.dims(node) if place is None else alone.dims_of_output(node, place)  # type: ignore[arg-type]
        for dim, role in zip(dims_made, part.roles, strict=True):
            rows = [atom for atom in alone.axes.flat(dim) if atom.sequence]
            if role is None or not rows:  # an axis that is made here
                if role == "row" and node.target not in (*RESHAPES, aten.expand.default):
                    raise _Unfit(f"`{node}` makes rows of its own")
                continue
            if len(rows) > 1 or role_of.setdefault(rows[0], role) != role:
                raise _Unfit(f"`{node}` has one axis in two roles")
        for action in alone.acts_along_sequence(node):
            if any(role_of.get(atom) == "row" for atom in alone.axes.flat(action.dim)):
                raise _Unfit(f"`{node}` ({node.target}) looks at other rows")
        out: dict[fx.Node, Roles] = {}
        for source, along in given.items():
            roles: list[Role | None] = []
            for rows in along:
                if len(rows) > 1:
                    raise _Unfit(f"`{source}` has two axes along the sequence in one dimension")
                roles.append(role_of.get(rows[0].root(), "column") if rows else None)
            out[source] = tuple(roles)
        return out

    def at_whole_length(self, node: fx.Node) -> fx.Node:
        """The same op in the trace of the whole sequence; the node itself where the length is a symbol, or where
        plans are made that will not be applied. Raises _Unfit."""
        whole = self.analysis.at_whole_length
        if not isinstance(self.analysis.length, int) or whole is None or node.op != "call_function":
            return node
        other = whole(node)
        if other is None or not isinstance(other.meta.get("val"), torch.Tensor):
            raise _Unfit(f"`{node}` is not found in the trace of the whole sequence")
        return other

    # ---------------------------------------------------------------------------------------------- into the graph

    def emit(self, emit: Emit, ranks: Ranks, parts: Sequence[_Part]) -> list[fx.Node]:
        """The parts asked for, in front of the node."""
        writer = _Writer(self, emit, ranks)
        for part, write in self.steps.items():
            writer.env[part] = write(writer)
        return [writer.env[part] for part in parts]

    def size(self, emit: Emit, expression: Any) -> Any:
        """A size of this rank as a number of the graph."""
        if isinstance(expression, int):
            return expression
        expression = sympy.sympify(expression)
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            for each in self.analysis.inputs:
                node = self.analysis.shadow.inputs.get(each.node)
                value = None if node is None else node.meta["val"]
                if isinstance(value, torch.Tensor):
                    for dim, size in enumerate(value.shape):
                        if same_size(size_of(size), expression):
                            return emit.call(aten.sym_size.int, each.node, dim)
        if expression.is_Add or expression.is_Mul:
            function = operator.add if expression.is_Add else operator.mul
            first, *rest = (self.size(emit, each) for each in expression.args)
            for each in rest:
                first = emit.call(function, first, each)
            return first
        raise _Unfit(f"the size {expression} is not one of an input")

    def _check_axes(self, part: _Part, made: bool) -> None:
        """Raises _Unfit for an axis that has no role, though its size depends on the length: one of a value `made` here
        if that is a symbol, of any value if another trace shows it."""
        length = sympy.sympify(self.analysis.length).free_symbols
        sizes, whole = (n.meta["val"].shape for n in (part.node, self.at_whole_length(part.node)))
        for dim, role in enumerate(part.roles):
            size = sympy.sympify(size_of(sizes[dim]))
            depends = not same_size(size, size_of(whole[dim])) or (made and bool(size.free_symbols & length))
            if role is None and depends:
                raise _Unfit(f"`{part.node}` has an axis of the size {size} that is not followed")

    def _grows(self, node: fx.Node) -> bool:
        """Another trace shows that the value is larger for a longer sequence."""
        sizes, whole = (n.meta["val"].shape for n in (node, self.at_whole_length(node)))
        return not all(same_size(size_of(a), size_of(b)) for a, b in zip(sizes, whole, strict=True))

    def _check_sizes(self, part: _Part) -> None:
        """Raises _Unfit for a size or a number that is none of the inputs' sizes, nor computed from them."""
        numbers = [n.meta["val"] for n in part.node.all_input_nodes if n not in tensors(part.node)]
        for number in [*part.node.meta["val"].shape, *numbers]:
            if isinstance(number, torch.SymFloat | torch.SymBool | float):
                raise _Unfit("a number that is computed from the length")
            if not isinstance(number, int | torch.SymInt):
                continue
            expression = sympy.sympify(size_of(number))
            if not expression.free_symbols <= self._symbols() or not expression.is_polynomial():
                raise _Unfit(f"the number {expression} is not made of sizes of inputs")

    def _symbols(self) -> set[Any]:
        values = [n.meta["val"] for n in self.analysis.shadow.inputs.values()]
        sizes = [size_of(s) for v in values if isinstance(v, torch.Tensor) for s in v.shape]
        return {size for size in sizes if not isinstance(size, int) and size.is_Symbol}

    def plan(self, apply: Callable[[Ranks], None]) -> Plan:
        if not self.gathered:
            raise _Unfit("no keys run along the sequence")
        constant = isinstance(self.analysis.length, int) and self.analysis.length != 1
        if constant and self.analysis.at_whole_length is None:
            apply = _not_applied
        # a `detach` is written again, too
        computed_again = [
            part.node
            for part in self.steps
            if part not in self.leaves and not stops_gradient(self.analysis, part.node)
        ]
        if (against := reason_against(self.analysis, computed_again, self.user_node)) is not None:
            raise _Unfit(against)
        sent = [("among all ranks", bytes_of(self.analysis, p.node)) for p in self.gathered]
        computed = {self.analysis.user_node(p.node) for p in self.steps} - {self.user_node, None}
        return Plan(
            "gathered keys",
            f"the rank's queries against the {len(self.gathered)} value(s) of all ranks: "
            + ", ".join(str(p.node) for p in self.gathered),
            apply,
            tuple(sent),
            tuple(n for n in computed if n is not None and n.op in ("call_function", "call_method")),
        )


def _not_applied(ranks: Ranks) -> None:
    raise AssertionError(
        "with a constant length, plans are made with the trace of the whole sequence at hand"
    )


@dataclass
class _Writer:
    """Writes the parts of a region into the user's graph."""

    region: _Region
    emit: Emit
    ranks: Ranks
    env: dict[_Part, Any] = field(default_factory=dict)

    def length(self) -> Any:
        return self.region.size(self.emit, self.region.analysis.length)

    def arguments(
        self, node: fx.Node, sources: Mapping[fx.Node, _Part]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an op in the graph; its numbers are those of the whole sequence's trace, if there is one."""
        names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
        whole = self.region.at_whole_length(node)
        if whole is not node and node.target not in _OF_THE_SLICE:
            self.region.analysis.with_whole_numbers.add(node)

        def given(name: str, value: Any, other: Any) -> Any:
            if isinstance(value, list | tuple):
                return [given(name, *each) for each in zip(value, other, strict=True)]
            return self.operand(value, sources, name) if isinstance(value, fx.Node) else other

        args = tuple(given(*each) for each in zip(names, node.args, whole.args, strict=False))
        return args, {name: given(name, value, whole.kwargs[name]) for name, value in node.kwargs.items()}

    def operand(self, node: fx.Node, sources: Mapping[fx.Node, _Part], name: str) -> Any:
        """A value, or a number that is the argument `name`: where it depends on the length it is that of the whole
        sequence, as the numbers that values are computed with are already (length.py)."""
        if node in sources:
            return self.env[sources[node]]
        expression = sympy.sympify(size_of(node.meta["val"]))
        if name not in VALUES:
            symbols = sympy.sympify(self.region.analysis.length).free_symbols
            expression = expression.subs({s: s * self.ranks.world_size for s in symbols})
        return self.region.size(self.emit, expression)

    def size_of(self, part: _Part, dim: int) -> Any:
        """A dimension of a part: that of the trace for rows, and for columns as many times that as there are ranks."""
        size = self.region.size(self.emit, size_of(part.node.meta["val"].shape[dim]))
        if part.roles[dim] != "column":
            return size
        if isinstance(size, int):
            return size * self.ranks.world_size
        return self.emit.call(operator.mul, size, self.ranks.world_size)


def _apart(analysis: Analysis, dim: Dim) -> tuple[Dim, list[Atom]]:
    """A dimension in atoms of its own, so that no two axes are one yet; and those along the sequence. Raises _Unfit."""
    axes = analysis.track.axes
    rows = axes.flat((axes.sequence,))
    flat = axes.flat(dim)
    atoms: list[Atom] = []
    along: list[Atom] = []
    while flat:
        if flat[: len(rows)] == rows:
            atom = Atom(axes.length, "rows", sequence=True)
            along.append(atom)
            flat = flat[len(rows) :]
        elif flat[0].sequence:
            raise _Unfit("some rows only")
        else:
            atom = Atom(flat[0].size)
            flat = flat[1:]
        atoms.append(atom)
    return tuple(atoms), along


_MOVES = (
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
)  # fmt: skip
_LINEAR = (
    *RESHAPES, *_MOVES, aten.expand.default, aten.clone.default, aten.detach.default, aten.alias.default,
    aten._to_copy.default, aten.slice.Tensor, aten.select.int, aten.cat.default, aten.constant_pad_nd.default,
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.tril.default,
    aten.triu.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
)  # fmt: skip
_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_FILLED: dict[Any, Any] = {
    aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None, aten.scalar_tensor.default: None,
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: None,
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None,
}  # fmt: skip
"""What is made of one number, and the number; None where it is an argument."""
_OF_THE_SLICE = (*_RANGES, *_FILLED, aten.tril.default, aten.triu.default, aten.slice.Tensor)
"""Ops that are written with the numbers that they have in the slice's trace, in some roles."""
