"""From the user's layout to the operator's and back: [B, T, H, K] whatever the axes were called and ordered.

A value is taken apart into its axes, permuted, given the axes it lacks, and put together. The same steps are done
on real tensors (for the numeric check) and on the user's graph (for the rewrite), so that what is checked is what
is wired: `arrange` and `disarrange` are written once, over an `Operations` that does either.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.checkpoints import inherit
from zeco_compile.passes.region import Sizes

aten = torch.ops.aten


class Canonical(enum.Enum):
    """The operator's layouts: q and k, v and o, the gate, a state."""

    KEY = "[B, T, H, K]"
    VALUE = "[B, T, H, V]"
    GATE = "[B, T, H, K] or [B, T, H]"
    STATE = "[B, H, K, V]"


@dataclass(frozen=True)
class CanonicalAxes:
    """Which of a region's axes are B, T, H, K and V. Each is a tuple of atoms, () for a size of one."""

    batch: tuple[Atom, ...]
    time: tuple[Atom, ...]
    heads: tuple[Atom, ...]
    key: tuple[Atom, ...]
    value: tuple[Atom, ...]
    gate_has_key: bool
    gate_has_rows: bool
    gate_family: str
    output: fx.Node
    analysis: Analysis
    rows: Atom
    """Stands for `time` where that is more than one axis, chunks and the rows of a chunk."""

    def dims(self, node: fx.Node) -> list[tuple[Atom, ...]]:
        """The dimensions of a value in root atoms."""
        track = self.analysis.track
        return [track.axes.flat(dim) for dim in track.dims(node)]

    def with_rows(self, *values: Sequence[tuple[Atom, ...]]) -> list[list[tuple[Atom, ...]]]:
        """The dimensions of several values with `rows` in place of `time`, where none has chunks in a dimension of
        their own; as they are otherwise."""
        joined = [[_with_one(dim, self.time, self.rows) for dim in dims] for dims in values]
        apart = any(a in self.time and a is not self.rows for dims in joined for dim in dims for a in dim)
        return [list(dims) for dims in values] if apart else joined

    @classmethod
    def find(
        cls,
        analysis: Analysis,
        output: fx.Node,
        q: Sequence[fx.Node],
        k: Sequence[fx.Node],
        v: Sequence[fx.Node],
        gate: fx.Node | None,
        value_atoms: Sequence[Atom],
    ) -> CanonicalAxes | None:
        """None where the axes do not fit the operator: v with an axis that is summed over, for one."""
        track = analysis.track

        def atoms(node: fx.Node) -> list[Atom]:
            return [a for dim in track.dims(node) for a in track.axes.flat(dim) if not a.sequence]

        out = atoms(output)
        value = list(value_atoms)
        if not q and gate is None and len(value) == len(out) and value:
            value = value[-1:]  # a plain running sum: all axes but the last are batch
        outer = [a for a in out if a not in value]
        sources = [a for n in (*q, *k, *([gate] if gate is not None else [])) for a in atoms(n)]
        key = list(dict.fromkeys(a for a in sources if a not in out))
        if any(a not in out for n in v for a in atoms(n)):
            return None
        gate_atoms = atoms(gate) if gate is not None else []
        for node in (output, *q, *k, *v, *([gate] if gate is not None else [])):
            if len(set(atoms(node))) < len(atoms(node)):
                return None  # an axis twice: a diagonal
        if any(a in value for n in (*q, *k) for a in atoms(n)) or any(a in value for a in gate_atoms):
            return None
        if any(a not in (*outer, *key) for n in (*q, *k) for a in atoms(n)):
            return None
        gate_has_key = any(a in key for a in gate_atoms)
        gate_has_rows = gate is not None and bool(track.sequence_dims(gate))
        if gate is None:
            family = "none"
        elif gate_has_key:
            family = "per channel"
        elif gate_has_rows:
            family = "per head and token"
        else:
            family = "constant per head"
        time = track.axes.flat((track.axes.sequence,))
        return cls(
            tuple(outer[:1]),
            time,
            tuple(outer[1:]),
            tuple(key),
            tuple(value),
            gate_has_key,
            gate_has_rows,
            family,
            output,
            analysis,
            time[0] if len(time) == 1 else Atom(track.axes.length, "rows", sequence=True),
        )

    def covers(self, kind: Canonical, node: fx.Node) -> bool:
        """Every axis of the value is one of the layout's, and none is there twice, as of a square matrix."""
        track = self.analysis.track
        known = {atom for group in self.groups(kind) for atom in group}
        have = [atom for dim in track.dims(node) for atom in track.axes.flat(dim)]
        return known.issuperset(have) and len(set(have)) == len(have)

    def groups(self, kind: Canonical) -> list[tuple[Atom, ...]]:
        """The dimensions of a layout, each as its atoms."""
        if kind is Canonical.STATE:
            return [self.batch, self.heads, self.key, self.value]
        last = {Canonical.KEY: self.key, Canonical.VALUE: self.value, Canonical.GATE: self.key}[kind]
        outer = [self.batch, self.time, self.heads]
        return outer if kind is Canonical.GATE and not self.gate_has_key else [*outer, last]


def _with_one(dim: tuple[Atom, ...], several: tuple[Atom, ...], one: Atom) -> tuple[Atom, ...]:
    for i in range(len(dim) - len(several) + 1):
        if dim[i : i + len(several)] == several:
            return (*dim[:i], one, *dim[i + len(several) :])
    return dim


def value_axes(
    analysis: Analysis, output: Sequence[Atom], others: Sequence[fx.Node], writers: Sequence[fx.Node]
) -> list[Atom]:
    """The axes of the output, other than the sequence, that nothing but v has: none of `others`, the gates and what
    reads the state. Where there are none of those, not all that is written has them either: k has not."""

    def axes_of(node: fx.Node) -> set[Atom]:
        return {a for dim in analysis.track.dims(node) for a in analysis.track.axes.flat(dim)}

    outer = set[Atom]().union(*map(axes_of, others))
    if not others and len(writers) > 1:
        outer = set.intersection(*map(axes_of, writers))
    left = [atom for atom in output if atom not in outer]
    return left or [atom for atom in output if not others]


class Operations(Protocol):
    """What arranging needs, on tensors or on graph nodes."""

    def size(self, atoms: Sequence[Atom]) -> Any: ...
    def reshape(self, x: Any, sizes: Sequence[Any]) -> Any: ...
    def squeeze(self, x: Any, dim: int) -> Any: ...
    def unsqueeze(self, x: Any, dim: int) -> Any: ...
    def permute(self, x: Any, order: Sequence[int]) -> Any: ...
    def expand(self, x: Any, sizes: Sequence[Any]) -> Any: ...
    def multiply(self, x: Any, y: Any) -> Any: ...
    def ones(self, sizes: Sequence[Any]) -> Any: ...


def arrange(
    ops: Operations,
    axes: CanonicalAxes,
    kind: Canonical,
    nodes: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
) -> Any:
    """The product of `values[node]` over `nodes`, in the operator's layout `kind`; ones without nodes."""
    groups, *dims_of = axes.with_rows(axes.groups(kind), *(axes.dims(node) for node in nodes))
    target = [atom for group in groups for atom in group]
    sizes = [ops.size(group) for group in groups]
    product = None
    covered: set[Atom] = set()
    for node, dims in zip(nodes, dims_of, strict=True):
        have = [atom for dim in dims for atom in dim]
        x = _taken_apart(ops, values[node], dims)
        order = [have.index(a) for a in target if a in have]
        if order != list(range(len(have))):
            x = ops.permute(x, order)
        for i, atom in enumerate(target):
            if atom not in have:
                x = ops.unsqueeze(x, i)
        product = x if product is None else ops.multiply(product, x)
        covered.update(have)
    if product is None:
        return ops.ones(sizes)
    if len(covered) < len(target):
        product = ops.expand(product, [ops.size([a]) for a in target])
    return _put_together(ops, product, groups)


def disarrange(
    ops: Operations,
    axes: CanonicalAxes,
    o: Any,
    kind: Canonical = Canonical.VALUE,
    node: fx.Node | None = None,
) -> Any:
    """The operator's o, [B, T, H, V], in the layout of the region's output; its state in that of `node`."""
    groups, dims = axes.with_rows(axes.groups(kind), axes.dims(axes.output if node is None else node))
    have = [atom for group in groups for atom in group]
    want = [atom for dim in dims for atom in dim]
    x = _taken_apart(ops, o, groups)
    order = [have.index(a) for a in want]
    if order != list(range(len(have))):
        x = ops.permute(x, order)
    return _put_together(ops, x, dims)


# Dimensions without an axis, of size one, are taken away and added one by one and not by a reshape: with one token
# per rank nothing would tell them from the sequence.


def _taken_apart(ops: Operations, x: Any, dims: Sequence[Sequence[Atom]]) -> Any:
    """`x` with these dimensions, as one dimension for each axis."""
    for i in reversed(range(len(dims))):
        if not dims[i]:
            x = ops.squeeze(x, i)
    if _one_each([dim for dim in dims if dim]):
        return x
    return ops.reshape(x, [ops.size([atom]) for dim in dims for atom in dim])


def _put_together(ops: Operations, x: Any, dims: Sequence[Sequence[Atom]]) -> Any:
    """The inverse of `_taken_apart`."""
    full = [dim for dim in dims if dim]
    if not _one_each(full):
        x = ops.reshape(x, [ops.size(dim) for dim in full])
    for i, dim in enumerate(dims):
        if not dim:
            x = ops.unsqueeze(x, i)
    return x


def _one_each(dims: Sequence[Sequence[Atom]]) -> bool:
    """Every dimension is one axis: nothing to take apart or to put together."""
    return all(len(dim) == 1 for dim in dims)


class TensorOperations:
    """Arranging real float64 tensors at the sizes of a probe."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def size(self, atoms: Sequence[Atom]) -> int:
        return self.sizes.of_dim(tuple(atoms))

    def reshape(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x.reshape(list(sizes))

    def squeeze(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.squeeze(dim)

    def unsqueeze(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.unsqueeze(dim)

    def permute(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return x.permute(list(order))

    def expand(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x.expand(list(sizes))

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def ones(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.ones(list(sizes), dtype=torch.float64)


def canonical_value(
    axes: CanonicalAxes,
    kind: Canonical,
    nodes: Sequence[fx.Node],
    values: Mapping[fx.Node, torch.Tensor],
    sizes: Sizes,
) -> torch.Tensor:
    """`arrange` on tensors."""
    out: torch.Tensor = arrange(TensorOperations(sizes), axes, kind, nodes, values)
    return out


def from_canonical_value(axes: CanonicalAxes, o: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """`disarrange` on a tensor."""
    out: torch.Tensor = disarrange(TensorOperations(sizes), axes, o)
    return out


def from_canonical_state(
    axes: CanonicalAxes, state: torch.Tensor, node: fx.Node, sizes: Sizes
) -> torch.Tensor | None:
    """The operator's state in the layout of `node`; None where its axes are not those of a state."""
    have = [atom for group in axes.groups(Canonical.STATE) for atom in group]
    want = [atom for dim in axes.dims(node) for atom in dim]
    if sorted(map(id, have)) != sorted(map(id, want)):
        return None
    out: torch.Tensor = disarrange(TensorOperations(sizes), axes, state, Canonical.STATE, node)
    return out


class GraphOperations:
    """Arranging nodes of the user's graph, at the graph's insertion point.

    `size_source(atom)` gives a user node and a dimension from which a symbolic size can be read; new nodes inherit from
    the user's node `stands_for`.
    """

    def __init__(
        self,
        graph: fx.Graph,
        size_source: Callable[[Atom], tuple[fx.Node, int]],
        like: fx.Node,
        dtype: torch.dtype,
        stands_for: fx.Node,
    ) -> None:
        self.graph, self.size_source, self.like, self.dtype = graph, size_source, like, dtype
        self.stands_for = stands_for
        self._sizes: dict[Atom, Any] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        return inherit(node, self.stands_for)

    def size(self, atoms: Sequence[Atom]) -> Any:
        product: Any = 1
        for atom in atoms:
            factor = self._size_of_atom(atom)
            if isinstance(product, int) and (isinstance(factor, int) or product == 1):
                product = product * factor if isinstance(factor, int) else factor
            else:
                product = self.call(operator.mul, product, factor)
        return product

    def _size_of_atom(self, atom: Atom) -> Any:
        if isinstance(atom.size, int):
            return atom.size
        if atom not in self._sizes:
            node, dim = self.size_source(atom)
            self._sizes[atom] = self.call(aten.sym_size.int, node, dim)
        return self._sizes[atom]

    def reshape(self, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        return self.call(aten.reshape.default, x, list(sizes))

    def squeeze(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.squeeze.dim, x, dim)

    def unsqueeze(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.unsqueeze.default, x, dim)

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        return self.call(aten.permute.default, x, list(order))

    def expand(self, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        return self.call(aten.expand.default, x, list(sizes))

    def multiply(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call(aten.mul.Tensor, x, y)

    def ones(self, sizes: Sequence[Any]) -> fx.Node:
        return self.call(aten.new_ones.default, self.like, list(sizes), dtype=self.dtype)


def promoted(nodes: Sequence[fx.Node], default: torch.dtype) -> torch.dtype:
    """The dtype of a product of `nodes`; `default` if there are none."""
    dtype = None
    for node in nodes:
        own = node.meta["val"].dtype
        dtype = own if dtype is None else torch.promote_types(dtype, own)
    return default if dtype is None else dtype
