"""Axes of every value in a shadow graph, and what each op does along the sequence.

`axis_rules.walk.track_axes` walks the graph once, applying a rule per op, and returns a `Tracking`: the dimensions of
every node and the actions along them. Whether an axis is the sequence is known only when the walk is over,
because a mask made by `ones(T, T)` learns what its axes are from the scores it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.axes import Atom, Axes, AxesConflict, Dim, Dims
from zeco_compile.passes.schema import argument
from zeco_compile.passes.sizes import Size, SizeFacts, same_size, size_of


@dataclass(frozen=True)
class Action:
    """`node` acts along `dim` in the way `kind`: "contract", "reduce", "along", "convolve", "slice", ..."""

    node: fx.Node
    dim: Dim
    kind: str


class Tracking:
    """Dimensions and actions of the nodes of one shadow graph."""

    current: fx.Node
    """The node that the walk is at; `broadcast` reports its problems there."""

    def __init__(self, length: Size, facts: SizeFacts, end_rows: Collection[fx.Node] = ()) -> None:
        self.axes = Axes(length, facts)
        self._end_rows = end_rows
        self.actions: dict[fx.Node, list[Action]] = {}
        self.problems: dict[fx.Node, str] = {}
        self.misaligned: set[fx.Node] = set()
        """Ops that combine rows of the sequence with rows at other positions."""
        self._dims: dict[fx.Node, Any] = {}
        self._stepwise: set[fx.Node] = set()

    # -------------------------------------------------------------------------------- read, after the walk

    def dims(self, node: fx.Node) -> Dims:
        return self._dims[node]

    def dims_of_output(self, node: fx.Node, index: int) -> Dims:
        return self._dims[node][index]

    def sequence_dims(self, node: fx.Node) -> list[int]:
        """The dimensions of a tensor that run along the sequence, in any way."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return []
        return [i for i, dim in enumerate(self.dims(node)) if self.axes.is_sequence(dim)]

    def acts_along_sequence(self, node: fx.Node) -> list[Action]:
        return [action for action in self.actions.get(node, ()) if self.axes.is_sequence(action.dim)]

    def stepwise(self, node: fx.Node) -> bool:
        """The value belongs to one position: it was selected along the sequence, or computed from such values."""
        return node in self._stepwise

    # ------------------------------------------------------------------------------------ called by the rules

    def out(self, node: fx.Node, dims: Dims) -> None:
        self._dims[node] = dims

    def outs(self, node: fx.Node, dims: Sequence[Dims]) -> None:
        self._dims[node] = list(dims)

    def scalar(self, node: fx.Node) -> None:
        self._dims[node] = ()

    def act(self, node: fx.Node, dim: Dim, kind: str) -> None:
        if dim:
            self.actions.setdefault(node, []).append(Action(node, dim, kind))

    def opaque(self, node: fx.Node, why: str) -> None:
        """Nothing is known: acts along every axis of every input, and its outputs have axes of their own."""
        self.problems[node] = why
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), torch.Tensor):
                for dim in self.dims(source):
                    self.act(node, dim, "unknown")
        sizes = self.output_sizes(node)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.out(node, self.fresh_dims(sizes[0], "unknown"))
        else:
            self.outs(node, [self.fresh_dims(s, "unknown") for s in sizes])

    def output_sizes(self, node: fx.Node) -> list[tuple[Size, ...]]:
        value = node.meta.get("val")
        values = [value] if isinstance(value, torch.Tensor) else list(value or ())
        return [tuple(size_of(s) for s in v.shape) if isinstance(v, torch.Tensor) else () for v in values]

    def fresh_dims(self, sizes: Sequence[Size], origin: str) -> Dims:
        return tuple(self.axes.fresh(size, origin) for size in sizes)

    def factory_dims(self, sizes: Sequence[Size], origin: str) -> Dims:
        """Axes of a tensor made from sizes alone. With a symbol in it, a size that is the length is the sequence;
        without, it is whatever it is combined with. One token per rank: a one may be either, so it gets an atom.
        """
        out: list[Dim] = []
        for size in sizes:
            if not isinstance(size, int) and self.axes.is_length(size):
                out.append((self.axes.sequence,))
            elif same_size(size, 1) and same_size(self.axes.length, 1):
                out.append((Atom(1, origin),))
            else:
                out.append(self.axes.fresh(size, origin))
        return tuple(out)

    def unified(self, node: fx.Node, a: Dim, b: Dim) -> Dim:
        """Both as one dimension; where they cannot be one, the op is marked as not understood."""
        if not a or not b:
            return a or b
        try:
            if not self.axes.unify(a, b):
                self.misaligned.add(node)
        except AxesConflict as conflict:
            self.problems[node] = f"axes that do not match: {conflict}"
            self.act(node, a, "unknown")
            self.act(node, b, "unknown")
        return a

    def broadcast(self, operands: Sequence[Dims]) -> Dims:
        """Dimensions of an elementwise combination, aligned at the right."""
        rank = max((len(dims) for dims in operands), default=0)
        out: list[Dim] = []
        for position in range(rank):
            merged: Dim = ()
            candidates = [
                dims[len(dims) - rank + position] for dims in operands if len(dims) >= rank - position
            ]
            # Atoms of size one (one token per rank) give way to real axes unless they are the sequence's.
            real = [dim for dim in candidates if dim and not self.only_unit(dim)]
            units = [dim for dim in candidates if dim and self.only_unit(dim)]
            for dim in real or units:
                merged = self.unified(self.current, merged, dim)
            if real and any(self.axes.is_sequence(dim) for dim in units):
                # A sequence of one token against an axis of several: it is spread, as at any length it could not.
                for dim in units:
                    self.act(self.current, dim, "unknown")
            out.append(merged)
        return tuple(out)

    def only_unit(self, dim: Dim) -> bool:
        return same_size(self.axes.size(dim), 1)

    def slice(self, node: fx.Node, dim: Dim, size_in: Size, size_out: Size) -> Dim:
        """The dimension after `x[start:end:step]`."""
        window = self.axes.window_of(dim)
        if same_size(size_in, size_out) and (window is None or node not in self._end_rows):
            return dim
        if (
            window is None or self.number(argument(node, "step")) != 1
        ):  # every second row, or some chunks: not the same rows on a slice
            self.act(node, dim, "part")
            # One token per rank: `table[:T]` and `table[:1]` look alike, so the row may be the sequence's.
            one = same_size(size_out, 1) and same_size(self.axes.length, 1)
            return (Atom(1, "slice"),) if one else self.axes.fresh(size_out, "slice")
        few = isinstance(size_out, int) and size_out > 0 and not isinstance(self.axes.length, int)
        if few or node in self._end_rows:
            # The first or the last few, whatever the length: of the whole sequence these are, and of no slice.
            self.act(node, dim, "rows")
            return self.axes.fresh(size_out, "rows")
        self.act(node, dim, "slice")
        left, right = window
        before, behind = self.cut(node, size_in, size_out)
        return self.axes.window(left - before, right - behind)

    def cut(self, node: fx.Node, size_in: Size, size_out: Size) -> tuple[Size, Size]:
        """How many rows `x[start:end]` leaves out before and behind."""
        start = self.number(argument(node, "start"))
        start = 0 if start is None else start
        if _is_negative(start):
            start = start + size_in
        return start, self.axes.facts.simplify(sympy.sympify(size_in) - start - size_out)

    def padded(self, dim: Dim, left: Size, right: Size, size: Size | None) -> Dim:
        window = self.axes.window_of(dim)
        if window is not None:
            before, after = window
            return self.axes.window(before + left, after + right)
        if size is None:
            size = sympy.sympify(self.axes.size(dim)) + left + right
            size = int(size) if size.is_Integer else size
        return self.axes.fresh(size, "pad")

    def windowed(self, node: fx.Node, dim: Dim, *, reach: int, step: int, size: Size) -> Dim:
        """The dimension of windows of `reach + 1` rows: row i of the result needs rows i .. i + reach."""
        window = self.axes.window_of(dim)
        self.act(node, dim, "window")
        if step != 1 or window is None:
            return self.axes.fresh(size, "window")
        left, right = window
        return self.axes.window(left - reach, right)

    def number(self, value: Any) -> Any:
        """An argument that is a number: int, or the expression of a symbolic one."""
        if isinstance(value, fx.Node):
            return size_of(value.meta["val"])
        return size_of(value) if isinstance(value, torch.SymInt) else value

    def mark_stepwise(self, node: fx.Node, yes: bool) -> None:
        (self._stepwise.add if yes else self._stepwise.discard)(node)


def _is_negative(value: Any) -> bool:
    return value < 0 if isinstance(value, int) else bool(sympy.sympify(value).is_negative)
