"""Code that computes with pairs of positions, written again for the rows of this rank and the columns of all.

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

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis, State
from zeco_compile.passes.length import VALUES
from zeco_compile.passes.modes import reason_against, stops_gradient
from zeco_compile.passes.pair_roles import Part, Roles, Unfit, roles_of_operands
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    current,
)
from zeco_compile.passes.schema import RESHAPES, argument, is_random, operand, shape, tensors
from zeco_compile.passes.sizes import same_size, size_of

aten = torch.ops.aten
zeco = torch.ops.zeco

Writing = Callable[["Writer"], Any]
"""Writes a part into the graph, when everything that it is computed from is there."""


@dataclass
class PairRegion:
    """What is computed again, part by part in an order that serves; how each part is written into the graph."""

    analysis: Analysis
    user_node: fx.Node
    from_pairs: Collection[fx.Node] = frozenset()
    """Scores, and all that is computed from them, also where it is of one position each, and known already."""
    steps: dict[Part, Writing] = field(default_factory=dict)
    sources: dict[Part, Collection[Part]] = field(default_factory=dict)
    gathered: list[Part] = field(default_factory=list)
    leaves: set[Part] = field(default_factory=set)
    _held: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _of_the_length: dict[fx.Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = {node: i for i, node in enumerate(self.user_node.graph.nodes)}
        self._held = self.analysis.shadow.holders(order, order[self.user_node] - 1)

    def need(self, node: fx.Node, roles: Roles) -> Part:
        """Adds the value in these roles, and what it is computed from. Raises Unfit."""
        part = Part(node, roles)
        if part not in self.steps:
            ways = [self._leaf, self._interior, self._cut_from_whole]
            if self.analysis.is_constant(node) and (any(roles) or node.target in SHAPED_LIKE):
                # made again: there is no need to send it, or what it is shaped like
                ways = [self._interior, self._cut_from_whole, self._leaf]
            elif node in self.from_pairs and not part.columns:
                ways = [
                    self._interior,
                    self._leaf,
                    self._cut_from_whole,
                ]  # from the very scores that are used here
            self.steps[part] = self._first(ways, part)
        return part

    def _first(self, ways: Sequence[Callable[[Part], Writing | None]], part: Part) -> Writing:
        """The first way that leads to the part; what the others have added on their way goes. Raises Unfit."""
        reason = Unfit(f"`{part.node}` is not followed")
        steps, gathered = len(self.steps), len(self.gathered)
        for way in ways:
            try:
                if (write := way(part)) is not None:
                    if way != self._cut_from_whole:
                        self._check_axes(part)
                    self._check_sizes(part)
                    if way == self._leaf:
                        self.leaves.add(part)
                    return write
            except Unfit as why:
                reason = why
            while len(self.steps) > steps:
                self.steps.popitem()
            del self.gathered[gathered:]
        raise reason

    def need_whole(self, node: fx.Node) -> Part:
        """Adds a value as the unsharded model has it: a mask or positions, computed on every rank. Raises Unfit."""
        part = Part(node, (), whole=True)
        if part not in self.steps:
            write = self._whole(part)
            self._check_sizes(part)
            self.steps[part] = write
        return part

    # -------------------------------------------------------------------------------------------- values at hand

    def _leaf(self, part: Part) -> Writing | None:
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

        def gather(writer: Writer) -> fx.Node:
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
        while node.target in (*RESHAPES, *MOVES, aten.expand.default, aten.clone.default):
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

    def _cut_from_whole(self, part: Part) -> Writing:
        """Numbers that need other rows (which document a token is in, counted from the first) are small: they are
        computed for the whole sequence, and this rank takes its rows."""
        rows = [d for d, role in enumerate(part.roles) if role is not None]
        if len(rows) > 1:
            raise Unfit(f"`{part.node}` has two axes along the sequence")
        whole = self.need_whole(part.node)
        if part.columns or not rows:
            return lambda writer: writer.env[whole]
        if not same_size(size_of(part.node.meta["val"].shape[rows[0]]), self.analysis.length):
            raise Unfit(f"`{part.node}` has the sequence folded into another axis")

        def cut(writer: Writer) -> fx.Node:
            length = writer.length()
            start = writer.emit.call(operator.mul, length, writer.ranks.rank)
            return writer.emit.call(aten.narrow.default, writer.env[whole], rows[0], start, length)

        return cut

    def _whole(self, part: Part) -> Writing:
        node, analysis = part.node, self.analysis
        made = node.meta.get("val")
        along = analysis.track.sequence_dims(node)
        holder = self._held.get(node)
        local = holder is not None and analysis.state(node) is State.LOCAL
        # with a constant length, an axis of constants may be the sequence and not be known as it
        unknown = isinstance(analysis.length, int) and analysis.is_constant(node)
        if local and not along and not self._grows(node) and not unknown:
            return lambda writer: current(holder)  # type: ignore[arg-type]
        if not isinstance(made, torch.Tensor):
            raise Unfit(f"`{node}` is no tensor")
        if not self._is_of_the_length(node):
            if made.dtype.is_floating_point:
                raise Unfit(f"`{node}` is no mask and no position")
            if local and self._grows(node, along):
                raise Unfit(f"`{node}` has an axis that is not followed")
            if local:
                columns = self.need(node, tuple("column" if d in along else None for d in range(made.dim())))
                return lambda writer: writer.env[columns]
        if node.op != "call_function" or is_random(node):
            raise Unfit(f"`{node}` is not followed")
        sources = {n: self.need_whole(n) for n in tensors(node)}

        def compute(writer: Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            target = aten.reshape.default if node.target in RESHAPES else node.target
            return writer.emit.call(target, *args, **kwargs)

        return compute

    # --------------------------------------------------------------------------------------------- values computed

    def _interior(self, part: Part) -> Writing:
        node, target = part.node, part.node.target
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            raise Unfit(f"`{node}` is not followed")
        if target is operator.getitem:
            return self._result(part)
        if is_random(node):
            raise Unfit(f"`{target}` is random")
        if target in _RANGES:
            return self._range(part)
        if target in _FILLED:
            return self._filled(part)
        if target in (aten.tril.default, aten.triu.default):
            return self._triangle(part)
        if self.analysis.is_table_lookup(node):
            return self._table(part)
        return self._computed(part)

    def _range(self, part: Part) -> Writing:
        node = part.node
        (role,) = part.roles
        start: Any = 0 if node.target is aten.arange.default else node.args[0]
        step: Any = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
        if not isinstance(start, int | float) or not isinstance(step, int | float):
            raise Unfit("a range that begins at a number which is computed")
        made = node.meta["val"]

        def write(writer: Writer) -> fx.Node:
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

    def _filled(self, part: Part) -> Writing:
        node = part.node
        if any(isinstance(n, fx.Node) for n in (*node.args[1:2], *node.kwargs.values()) if n is not None):
            raise Unfit(f"`{node}` is filled with a number that is computed")
        made = node.meta["val"]
        value = _FILLED[node.target]
        if value is None:
            value = argument(node, "fill_value", None)
            if node.target is aten.scalar_tensor.default:
                value = argument(node, "s")
        if not isinstance(value, int | float | bool):
            raise Unfit(f"`{node}` is filled with a number that is computed")

        def write(writer: Writer) -> fx.Node:
            sizes = [writer.size_of(part, d) for d in range(made.dim())]
            return writer.emit.call(torch.full, sizes, value, dtype=made.dtype, device=made.device)

        return write

    def _triangle(self, part: Part) -> Writing:
        node = part.node
        source = self.need(operand(node, 0), part.roles)
        diagonal = argument(node, "diagonal", 0)
        last = part.roles[-2:]
        if None in last or not isinstance(diagonal, int):
            if any(last):
                raise Unfit("a triangle of one axis along the sequence and another one")
            return lambda writer: writer.emit.call(node.target, writer.env[source], diagonal)

        def write(writer: Writer) -> fx.Node:
            shift: Any = diagonal
            if last[0] != last[1]:
                length = writer.length()
                passed = writer.emit.call(operator.mul, length, writer.ranks.rank)
                down = operator.add if last[0] == "row" else operator.sub
                shift = writer.emit.call(down, diagonal, passed)
            return writer.emit.call(node.target, writer.env[source], shift)

        return write

    def _table(self, part: Part) -> Writing:
        """`table[:T]`: rows by position of something that every rank holds."""
        node = part.node
        dim = argument(node, "dim", 0) % node.meta["val"].dim()
        if argument(node, "start", 0) not in (0, None) or argument(node, "step", 1) != 1:
            raise Unfit("rows of a table that do not begin with the first")
        symbols = sympy.sympify(self.analysis.length).free_symbols
        if sympy.sympify(shape(operand(node, 0))[dim]).free_symbols & symbols:
            raise Unfit("rows of a table that is as long as this rank's slice, and longer")
        role = part.roles[dim]
        source = self.need(operand(node, 0), (*part.roles[:dim], None, *part.roles[dim + 1 :]))

        def write(writer: Writer) -> fx.Node:
            count = writer.size_of(part, dim)
            start: Any = writer.emit.call(operator.mul, count, writer.ranks.rank) if role == "row" else 0
            return writer.emit.call(aten.narrow.default, writer.env[source], dim, start, count)

        return write

    def _needed(self, part: Part) -> dict[fx.Node, Part]:
        """The operands of an op in the roles in which it needs them. Raises Unfit."""
        sources = {n: self.need(n, roles) for n, roles in roles_of_operands(self.analysis, part).items()}
        self.sources[part] = sources.values()
        if part.node.target not in (aten.mm.default, aten.bmm.default) and len(sources) > 1:
            self._check_scores(part)
        return sources

    def _check_scores(self, part: Part) -> None:
        """Raises Unfit where scores meet what is computed from the same ones, but of other rows: it would be computed
        in another way here, and `scores < threshold` is another mask if the rounding of the threshold is another."""
        seen, stack, roles_of = {part}, list(self.sources[part]), dict[fx.Node, Roles]()
        while stack:
            each = stack.pop()
            if each in seen or each.node not in self.from_pairs or self.analysis.is_constant(each.node):
                continue
            seen.add(each)
            if each.whole or each in self.leaves or roles_of.setdefault(each.node, each.roles) != each.roles:
                raise Unfit(f"`{part.node}` combines scores with those of other rows")
            stack += self.sources.get(each, ())

    def _computed(self, part: Part) -> Writing:
        node, target = part.node, part.node.target
        sources = self._needed(part)
        if target in (*RESHAPES, aten.expand.default):
            (source,) = sources.values()
            reshape = aten.expand.default if target is aten.expand.default else aten.reshape.default

            def write(writer: Writer) -> fx.Node:
                sizes = [writer.size_of(part, d) for d in range(len(part.roles))]
                return writer.emit.call(reshape, writer.env[source], sizes)

            return write
        if target is aten.slice.Tensor:
            dim = argument(node, "dim", 0) % len(part.roles)
            if part.roles[dim] is not None:
                ((value, source),) = sources.items()
                if self.analysis.is_window(node) or self.analysis.is_window(value):
                    raise Unfit(f"`{node}` cuts off rows of the sequence")
                return lambda writer: writer.env[source]

        def compute(writer: Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            return writer.emit.call(target, *args, **kwargs)

        return compute

    def _result(self, part: Part) -> Writing:
        """One of several results of an op: `scores.topk(8, -1).values`."""
        node, place = operand(part.node, 0), part.node.args[1]
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or is_random(node)
            or node.target.namespace == "zeco"  # made for the rows of a slice
        ):
            raise Unfit(f"`{node}` has several results, and is not followed")
        sources = self._needed(part)

        def compute(writer: Writer) -> fx.Node:
            args, kwargs = writer.arguments(node, sources)
            return writer.emit.call(operator.getitem, writer.emit.call(node.target, *args, **kwargs), place)

        return compute

    def at_whole_length(self, node: fx.Node) -> fx.Node:
        """The same op in the trace of the whole sequence; the node itself where the length is a symbol, or where
        plans are made that will not be applied. Raises Unfit."""
        whole = self.analysis.at_whole_length
        if not isinstance(self.analysis.length, int) or whole is None or node.op != "call_function":
            return node
        other = whole(node)
        if other is None or not isinstance(other.meta.get("val"), torch.Tensor):
            raise Unfit(f"`{node}` is not found in the trace of the whole sequence")
        return other

    # ---------------------------------------------------------------------------------------------- into the graph

    def emit(self, emit: Emit, ranks: Ranks, parts: Sequence[Part]) -> list[fx.Node]:
        """The parts asked for, in front of the node."""
        writer = Writer(self, emit, ranks)
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
        raise Unfit(f"the size {expression} is not one of an input")

    def _check_axes(self, part: Part) -> None:
        """Raises Unfit for an axis that has no role, though its size depends on the length."""
        followed = [dim for dim, role in enumerate(part.roles) if role is not None]
        if self._grows(part.node, followed):
            raise Unfit(f"`{part.node}` has an axis that is not followed, whose size depends on the length")

    def _grows(self, node: fx.Node, followed: Collection[int] = ()) -> bool:
        """The value is larger for a longer sequence, in a dimension that is none of those `followed`."""
        length = sympy.sympify(self.analysis.length).free_symbols
        sizes, whole = (n.meta["val"].shape for n in (node, self.at_whole_length(node)))
        return any(
            not same_size(size_of(a), size_of(b)) or bool(sympy.sympify(size_of(a)).free_symbols & length)
            for dim, (a, b) in enumerate(zip(sizes, whole, strict=True))
            if dim not in followed
        )

    def _is_of_the_length(self, node: fx.Node) -> bool:
        """Computed from sizes, and from what every rank holds: parameters, buffers."""
        if node not in self._of_the_length:
            made = node.op == "call_function" and getattr(node.target, "namespace", "") != "zeco"
            self._of_the_length[node] = self.analysis.is_constant(node) or (
                not self.analysis.track.sequence_dims(node)
                if node.op != "call_function"
                else made and all(map(self._is_of_the_length, tensors(node)))
            )
        return self._of_the_length[node]

    def _check_sizes(self, part: Part) -> None:
        """Raises Unfit for a size or a number that is none of the inputs' sizes, nor computed from them."""
        numbers = [n.meta["val"] for n in part.node.all_input_nodes if n not in tensors(part.node)]
        for number in [*part.node.meta["val"].shape, *numbers]:
            if isinstance(number, torch.SymFloat | torch.SymBool | float):
                raise Unfit("a number that is computed from the length")
            if not isinstance(number, int | torch.SymInt):
                continue
            expression = sympy.sympify(size_of(number))
            if not expression.free_symbols <= self._symbols() or not expression.is_polynomial():
                raise Unfit(f"the number {expression} is not made of sizes of inputs")

    def _symbols(self) -> set[Any]:
        values = [n.meta["val"] for n in self.analysis.shadow.inputs.values()]
        sizes = [size_of(s) for v in values if isinstance(v, torch.Tensor) for s in v.shape]
        return {size for size in sizes if not isinstance(size, int) and size.is_Symbol}

    def plan(self, apply: Callable[[Ranks], None]) -> Plan:
        if not self.gathered:
            raise Unfit("no keys run along the sequence")
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
            raise Unfit(against)
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
class Writer:
    """Writes the parts of a region into the user's graph."""

    region: PairRegion
    emit: Emit
    ranks: Ranks
    env: dict[Part, Any] = field(default_factory=dict)

    def length(self) -> Any:
        return self.region.size(self.emit, self.region.analysis.length)

    def arguments(
        self, node: fx.Node, sources: Mapping[fx.Node, Part]
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

    def operand(self, node: fx.Node, sources: Mapping[fx.Node, Part], name: str) -> Any:
        """A value, or a number that is the argument `name`: where it depends on the length it is that of the whole
        sequence, as the numbers that values are computed with are already (length.py)."""
        if node in sources:
            return self.env[sources[node]]
        expression = sympy.sympify(size_of(node.meta["val"]))
        if name not in VALUES:
            symbols = sympy.sympify(self.region.analysis.length).free_symbols
            expression = expression.subs({s: s * self.ranks.world_size for s in symbols})
        return self.region.size(self.emit, expression)

    def size_of(self, part: Part, dim: int) -> Any:
        """A dimension of a part: that of the trace for rows, and for columns as many times that as there are ranks."""
        size = self.region.size(self.emit, size_of(part.node.meta["val"].shape[dim]))
        if part.roles[dim] != "column":
            return size
        if isinstance(size, int):
            return size * self.ranks.world_size
        return self.emit.call(operator.mul, size, self.ranks.world_size)


MOVES = (
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
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
