"""Rules for losses: sums and means over the sequence, and over a part of it.

A language model's loss compares the logits without their last row with the labels without their first. Row i of one
stands beside row i + 1 of the other, and whatever is computed from both up to the sum or the mean has a row less
than the sequence. On slices: every rank takes all of its rows, gets the first labels of the next rank, and computes
the same for each; only the last rank has rows too many at the end, which do not enter the sum or the count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.modes import reason_against
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    call_arguments,
    current,
    is_local,
    kinds,
    row_dim,
    single_output,
    substitute,
    through_views,
    window_of,
)
from zeco_compile.passes.schema import RESHAPES, argument, is_random, operand, tensors

aten = torch.ops.aten
zeco = torch.ops.zeco


# ------------------------------------------------------------------------------------------- over all of the rows


def cross_entropy(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`F.cross_entropy` of all rows. A mean of the ranks' means would weigh the ranks alike, whatever is ignored."""
    call = _CrossEntropy.of(analysis, user_node)
    if call is None or not (is_local(analysis, call.logits) and is_local(analysis, call.labels)):
        return None
    if not analysis.track.sequence_dims(call.labels):
        return None

    def apply(ranks: Ranks) -> None:
        given = call.arguments()
        call.emit(Emit(user_node, after=False), ranks, given["input"], given["target"])

    return Plan("all-reduce", call.detail, apply, call.exchanges)


@dataclass(frozen=True)
class _CrossEntropy:
    """A call of `F.cross_entropy` with class numbers as labels."""

    user_node: fx.Node
    logits: fx.Node
    labels: fx.Node
    mean: bool
    ignored: int

    @classmethod
    def of(cls, analysis: Analysis, user_node: fx.Node) -> _CrossEntropy | None:
        """None for another call, and where anything but the sum over the labels looks at other positions: where the
        classes are the positions (over_all_ranks.py has a rule for these), or logits and labels do not match."""
        if user_node.target is not torch.nn.functional.cross_entropy:
            return None
        if any(kinds(analysis, node) - {"reduce"} for node in analysis.shadow.groups.get(user_node, [])):
            return None
        given = call_arguments(user_node, _CE_NAMES)
        reduction = given.get("reduction", "mean")
        if given.get("size_average") is not None or given.get("reduce") is not None or reduction == "none":
            return None
        logits, labels = (analysis.shadow.reads.get((user_node, given[n])) for n in ("input", "target"))
        if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
            return None
        if labels.meta["val"].dtype.is_floating_point:
            return None
        return cls(user_node, logits, labels, reduction == "mean", given.get("ignore_index", -100))

    @property
    def detail(self) -> str:
        return "global sum over the global count of labels" if self.mean else "sum over all ranks"

    @property
    def exchanges(self) -> tuple[tuple[str, int], ...]:
        return (("among all ranks", 8 if self.mean else 4),)

    def arguments(self) -> dict[str, Any]:
        return call_arguments(self.user_node, _CE_NAMES)

    def emit(self, emit: Emit, ranks: Ranks, source: fx.Node, target: fx.Node) -> None:
        """The same of these logits and labels and those of the other ranks, instead of the call."""
        given = self.arguments()
        weight = given.get("weight")
        rest = {k: v for k, v in given.items() if k not in ("input", "target", "reduction")}
        local = emit.call(torch.nn.functional.cross_entropy, source, target, **rest, reduction="sum")
        total = emit.call(zeco.all_sum.default, local, ranks.group)
        if self.mean:
            counted = emit.call(torch.ne, target, self.ignored)
            if weight is not None:
                known = emit.call(torch.where, counted, target, 0)
                counted = emit.call(torch.mul, emit.call(torch.take, weight, known), counted)
            count = emit.call(torch.sum, counted)
            total = emit.call(torch.div, total, emit.call(zeco.all_sum.default, count, ranks.group))
        substitute(self.user_node, total)


_CE_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


# ---------------------------------------------------------------------------------------------- over some of them


def over_windows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """A sum or a mean, or a loss that ends in one, over rows that were cut off at one end or at both."""
    call = _CrossEntropy.of(analysis, user_node)
    if call is not None and analysis.track.sequence_dims(call.labels):
        region = _Windows.of(analysis, user_node, [call.logits, call.labels])
        if region is None:
            return None
        found = region
        entropy = call

        def apply_entropy(ranks: Ranks) -> None:
            emit = Emit(user_node, after=False)
            logits, labels = found.emit(emit, ranks)
            counts = found.counts(emit, ranks, entropy.labels, labels)
            entropy.emit(emit, ranks, logits, emit.call(torch.where, counts, labels, entropy.ignored))

        return region.plan(call.detail, apply_entropy, call.exchanges)
    return _reduction_of_windows(analysis, user_node)


_LOSSES = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip
"""Losses of two values, and perhaps weights, that reduce by themselves: mean by default."""

_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)


def _reduction_of_windows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    output = single_output(analysis, user_node)
    if output is None or analysis.track.sequence_dims(output):
        return None
    node = through_views(output)
    if node.target not in (*_LOSSES, *_SUMS, *_MEANS) or analysis.user_node(node) is not user_node:
        return None
    if kinds(analysis, node) - {"reduce"}:
        return None  # of two values whose rows are in another order
    sources = tensors(node)
    shaped_like = max(sources, key=lambda source: source.meta["val"].dim())
    region = _Windows.of(analysis, user_node, sources)
    if region is None or not analysis.track.sequence_dims(shaped_like):
        return None
    found = region
    mean = node.target in _MEANS
    if node.target in _LOSSES:
        mean = argument(node, "reduction", 1) == 1
        if argument(node, "reduction", 1) == 0:
            return None
    made = node.meta["val"]
    views = _views_between(node, output)

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        values = found.emit(emit, ranks)
        x = values[0]
        if node.target in _LOSSES:
            env = dict(zip(sources, values, strict=True))
            names = [a.name for a in node.target._schema.arguments]
            each = [0 if name == "reduction" else argument(node, name) for name in names]
            x = emit.call(node.target, *fx.map_arg(each, env.__getitem__))
        dims = argument(node, "dim") if _takes(node, "dim") else None
        count = shaped_like.meta["val"].dim()
        dims = sorted(d % count for d in dims) if dims else list(range(count))
        keep = bool(argument(node, "keepdim", False)) if _takes(node, "keepdim") else False
        half = made.dtype in (torch.float16, torch.bfloat16)
        x = emit.call(torch.where, found.counts(emit, ranks, shaped_like, x), x, 0)
        local = emit.call(torch.sum, x, dims, keep, dtype=torch.float32 if half else made.dtype)
        total = emit.call(zeco.all_sum.default, local, ranks.group)
        if mean:
            total = emit.call(torch.div, total, found.number(emit, ranks, x, dims))
        if half:
            total = emit.call(aten.to.dtype, total, made.dtype)
        for view in views:
            total = emit.call(view.target, total, *view.args[1:], **view.kwargs)
        substitute(user_node, total)

    what = "global sum over the global number of rows" if mean else "sum over all ranks"
    return region.plan(what, apply, (("among all ranks", bytes_of(analysis, node)),))


def _takes(node: fx.Node, name: str) -> bool:
    return any(a.name == name for a in node.target._schema.arguments)  # type: ignore[union-attr]


def _views_between(node: fx.Node, output: fx.Node) -> list[fx.Node]:
    views = []
    while output is not node:
        views.append(output)
        output = operand(output, 0)
    return views[::-1]


@dataclass(frozen=True)
class _Base:
    """A value of all rows, of which the region reads those from number `start` on; as user node `holder`."""

    value: fx.Node
    dim: int
    start: int
    holder: fx.Node


@dataclass
class _Windows:
    """What is computed, row by row, from rows that were cut out of values of all rows: `by` fewer than those have.

    `bases` are by the slice that reads them, `outer` are the user's nodes for what has no rows, `interior` is the
    rest, in order.
    """

    analysis: Analysis
    user_node: fx.Node
    results: list[fx.Node]
    by: int = 0
    bases: dict[fx.Node, _Base] = field(default_factory=dict)
    outer: dict[fx.Node, fx.Node] = field(default_factory=dict)
    interior: list[fx.Node] = field(default_factory=list)
    slices: list[fx.Node] = field(default_factory=list)

    @classmethod
    def of(cls, analysis: Analysis, user_node: fx.Node, results: list[fx.Node]) -> _Windows | None:
        """The region behind `results`; None where something in it needs more than its own row."""
        region = cls(analysis, user_node, results)
        order = {node: i for i, node in enumerate(user_node.graph.nodes)}
        held = analysis.shadow.holders(order, order[user_node])
        stack, seen = list(results), set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if not region._take(node, held, stack):
                return None
        inside = set(region.interior)
        region.interior = [n for n in analysis.shadow.graph.nodes if n in inside]
        if reason_against(analysis, [*region.interior, *region.slices], user_node) is not None:
            return None
        rows = [each for each in results if analysis.track.sequence_dims(each)]
        return region if region.bases and rows and all(map(region._is_plain, rows)) else None

    def _is_plain(self, node: fx.Node) -> bool:
        """One dimension has the rows, and at most whole axes beside them."""
        axes, dims = self.analysis.track.axes, self.analysis.track.sequence_dims(node)
        if len(dims) != 1:
            return False
        atoms = axes.flat(self.analysis.track.dims(node)[dims[0]])
        along = [i for i, atom in enumerate(atoms) if atom.sequence]
        return len(along) == 1 and isinstance(axes.size(atoms[along[0] + 1 :]), int)

    def _take(self, node: fx.Node, held: dict[fx.Node, fx.Node], stack: list[fx.Node]) -> bool:
        analysis = self.analysis
        rows = analysis.track.sequence_dims(node)
        if not rows and analysis.state(node) is State.LOCAL and node in held:
            self.outer[node] = held[node]
            return True
        if node.op != "call_function":
            return False
        if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            return self._take_size(node, held)
        if rows and node.target is aten.slice.Tensor and (cut := self._cut(node, held)) is not None:
            base, by = cut
            if self.bases and by != self.by:
                return False
            self.by, self.bases[node] = by, base
            return True
        if is_random(node):
            return False
        if analysis.own_mixing(node) or analysis.is_pair(node) or analysis.is_table_lookup(node):
            return False
        if rows and (len(rows) > 1 or not node.all_input_nodes or analysis.is_constant(node)):
            return False
        if node.target in (aten.expand.default, *_FACTORIES) and rows:
            return False
        self.interior.append(node)
        if node.target in RESHAPES:  # the sizes of dimensions with rows follow from the others
            sizes = [size for dim, size in enumerate(node.args[1]) if dim not in rows]  # type: ignore[arg-type]
            stack.extend(n for n in (node.args[0], *sizes) if isinstance(n, fx.Node))
        else:
            stack.extend(node.all_input_nodes)
        return True

    def _take_size(self, node: fx.Node, held: dict[fx.Node, fx.Node]) -> bool:
        """A size of a value that is there, along no row."""
        if node.target is not aten.sym_size.int or operand(node, 0) not in held:
            return False
        source, dim = operand(node, 0), argument(node, "dim")
        if dim in self.analysis.track.sequence_dims(source):
            return False
        self.outer[source] = held[source]
        self.interior.append(node)
        return True

    def _cut(self, node: fx.Node, held: dict[fx.Node, fx.Node]) -> tuple[_Base, int] | None:
        """The base of a slice of rows, or of a slice of a slice, and how many rows fewer it has."""
        analysis = self.analysis
        window, dim = window_of(analysis, node), row_dim(analysis, node)
        source = operand(node, 0)
        self.slices.append(node)
        while source.target is aten.slice.Tensor and analysis.state(source) is State.WINDOW:
            self.slices.append(source)
            source = operand(source, 0)
        if window is None or dim is None or analysis.state(source) is not State.LOCAL or source not in held:
            return None
        if not analysis.track.axes.is_whole_sequence(analysis.track.dims(source)[dim]):
            return None
        start, end = (-each if isinstance(each, int) else -1 for each in window)
        if start < 0 or end < 0 or start + end == 0:
            return None
        return _Base(source, dim, start, held[source]), start + end

    def plan(
        self, detail: str, apply: Callable[[Ranks], None], exchanges: tuple[tuple[str, int], ...]
    ) -> Plan:
        bases = dict.fromkeys((b.value, b.dim, b.start) for b in self.bases.values() if b.start)
        sent = [("to the previous rank", bytes_of(self.analysis, v, d, rows)) for v, d, rows in bases]
        covers = {self.analysis.user_node(n) for n in (*self.interior, *self.bases)} - {self.user_node, None}
        return Plan(
            "all-reduce",
            f"{detail}; without {self.by} row(s) of the whole sequence, shifted across the ranks' borders",
            apply,
            (*exchanges, *sent),
            tuple(n for n in covers if n is not None),
        )

    # ------------------------------------------------------------------------------------------- into the graph

    def emit(self, emit: Emit, ranks: Ranks) -> list[fx.Node]:
        """The results for all rows of the slice. In rows that the unsharded model does not have, something that
        other rows have, too: no result of theirs may be infinite, or the gradient would be none."""
        env: dict[fx.Node, Any] = {node: current(holder) for node, holder in self.outer.items()}
        shifted: dict[Any, fx.Node] = {}
        for node, base in self.bases.items():
            key = (base.value, base.dim, base.start)
            if key not in shifted:
                shifted[key] = self._rows(emit, ranks, base)
            env[node] = shifted[key]
        for node in self.interior:
            env[node] = self._call(emit, node, env)
        return [env[node] for node in self.results]

    def _rows(self, emit: Emit, ranks: Ranks, base: _Base) -> fx.Node:
        x = current(base.holder)
        if not base.start:
            return x
        rows = emit.call(zeco.halo.default, x, base.dim, 0, base.start, 0.0, ranks.group)
        rows = emit.call(aten.slice.Tensor, rows, base.dim, base.start)
        there = emit.call(zeco.rows_followed.default, x, base.dim, self.by, ranks.group)
        last = emit.call(aten.slice.Tensor, x, base.dim, -1)
        shape = [1] * base.value.meta["val"].dim()
        shape[base.dim] = -1
        return emit.call(torch.where, emit.call(aten.reshape.default, there, shape), rows, last)

    def _call(self, emit: Emit, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = node.args, node.kwargs
        if node.target in RESHAPES:
            rows = self.analysis.track.sequence_dims(node)
            sizes = [-1 if dim in rows else size for dim, size in enumerate(args[1])]  # type: ignore[arg-type]
            return emit.call(aten.reshape.default, *fx.map_arg((args[0], sizes), env.__getitem__))
        args, kwargs = fx.map_arg((args, kwargs), env.__getitem__)
        return emit.call(node.target, *args, **kwargs)

    def counts(self, emit: Emit, ranks: Ranks, value: fx.Node, emitted: fx.Node) -> fx.Node:
        """Which rows of a value count: bool, of a shape that goes with it."""
        axes = self.analysis.track.axes
        base = next(iter(self.bases.values()))
        x = current(base.holder)
        there = emit.call(zeco.rows_followed.default, x, base.dim, self.by, ranks.group)
        (dim,) = self.analysis.track.sequence_dims(value)
        atoms = axes.flat(self.analysis.track.dims(value)[dim])
        inner = axes.size(atoms[[a.sequence for a in atoms].index(True) + 1 :])
        if len(atoms) > 1:
            rows = emit.call(aten.sym_size.int, emitted, dim)
            length = emit.call(aten.sym_size.int, x, base.dim)
            device = value.meta["val"].device
            number = emit.call(torch.arange, rows, device=device)
            number = emit.call(torch.remainder, emit.call(torch.floor_divide, number, inner), length)
            there = emit.call(aten.index.Tensor, there, [number])
        shape = [1] * value.meta["val"].dim()
        shape[dim] = -1
        return emit.call(aten.reshape.default, there, shape)

    def number(self, emit: Emit, ranks: Ranks, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """How many elements of all ranks a mean over `dims` is of."""
        base = next(iter(self.bases.values()))
        length = emit.call(aten.sym_size.int, current(base.holder), base.dim)
        total: Any = emit.call(operator.mul, length, ranks.world_size)
        total = emit.call(operator.sub, total, self.by)
        for dim in dims:
            total = emit.call(operator.mul, total, emit.call(aten.sym_size.int, x, dim))
        return emit.call(operator.floordiv, total, length)


_FACTORIES = (
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip
