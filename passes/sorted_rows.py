"""Rows of the sequence that are sorted, worked on one by one or group by group, and sorted back.

A mixture of experts often does so: the pairs of a token and an expert are sorted by expert, each expert's rows are
multiplied with its weights, and the results are put back or added up where their tokens are. Sorting looks at all
positions, and so does counting the rows of each expert; but what comes back to a position depends on nothing but that
position, so each rank does it with its own rows and nothing is exchanged.

Contract: `settle_sorted_rows(analysis, decisions)` finds every sort of rows for which this can be proven, and marks
what it consists of as intended. The proof follows each value that the sort has a part in, up to where rows are back:

- the *order*, the number of the row that has come to each place: it picks rows of values that run along the sequence,
  tells where results go, or is inverted, and does nothing else: it is different on a slice;
- values *in this order*: only what is done to each row alone, whatever its place;
- *counts* of rows per key, and their cumulative sums, the ends of groups: only to say which weights a row is
  multiplied with.

Whatever else one of them enters is a departure, and `departure(analysis, sort)` says where and why.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis
from zeco_compile.passes.axes import Dim, Dims
from zeco_compile.passes.axis_rules.products import is_grouped_product
from zeco_compile.passes.axis_rules.walk import visit
from zeco_compile.passes.length import VALUES, uses_of_length
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.plans import mixing_nodes, settle, settled
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.schema import argument, operand, tensors
from zeco_compile.passes.sizes import same_size, size_of
from zeco_compile.passes.tracking import Tracking

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)


def settle_sorted_rows(analysis: Analysis, decisions: list[Decision]) -> int:
    """Marks what sorts rows and sorts them back. Returns how many sorts were found to be of that kind."""
    found = 0
    for node in analysis.shadow.graph.nodes:
        if not _sorts_rows(analysis, node) or settled(analysis.shadow.origin[node]):
            continue
        region = _Region(analysis, node)
        try:
            user_nodes = region.follow()
        except _Departs:
            continue  # the sort is refused where nothing else makes it right: `departure` says why
        for user_node in user_nodes:
            settle(user_node)
        user_node = analysis.shadow.origin[node]
        decisions.append(
            Decision(
                str(user_node),
                op_name(user_node),
                "position-local",
                user_location(user_node),
                "rows are sorted, worked on one by one or by group, and sorted back: each rank sorts its own",
            )
        )
        found += 1
    return found


def departure(analysis: Analysis, node: fx.Node) -> str | None:
    """Why a sort of rows is not undone, with the user's line; None if `node` is none."""
    if not _sorts_rows(analysis, node):
        return None
    try:
        _Region(analysis, node).follow()
    except _Departs as why:
        where = user_location(analysis.user_node(why.node))
        return f"Its rows are not sorted back in a way that is followed: at {where} {why}"
    return None


def _sorts_rows(analysis: Analysis, node: fx.Node) -> bool:
    return node.target in (*_SORTS, *_ARGSORTS) and bool(analysis.track.acts_along_sequence(node))


class _Departs(Exception):
    """A value leaves the region at `node`, or is used there in a way that is not followed."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


class _Kind(enum.Enum):
    SORTED = "the rows in order, and the order"
    ROWS = "rows in this order"
    KEYS = "rows in this order: what they are sorted by"
    SEVERAL = "several values in this order"
    ORDER = "the number of the row at each place"
    INVERSE = "the place of each row"
    SORTED_ORDER = "the order, sorted, and its inverse"
    COUNTS = "how many rows have each key"
    ENDS = "where the rows of each key end"


@dataclass(frozen=True)
class _Meaning:
    """What a value of the region is. An order may have been divided `by` a number: that of the token of each pair."""

    kind: _Kind
    by: int = 1


_ROWWISE = (_Kind.ROWS, _Kind.KEYS, _Kind.SEVERAL)

_SAME = (
    aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_ORDERED_TYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Types in which numbers of rows, and keys that are compared, stay in their order."""

_COUNTING: dict[Any, tuple[_Kind, _Kind]] = {
    aten.histc.default: (_Kind.KEYS, _Kind.COUNTS),
    aten.cumsum.default: (_Kind.COUNTS, _Kind.ENDS),
}  # fmt: skip

_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)
_FLOOR = {aten.floor_divide.default: None, aten.div.Tensor_mode: "floor", aten.div.Scalar_mode: "floor"}


@dataclass
class _Region:
    """What is made of one sort, followed forwards."""

    analysis: Analysis
    sort: fx.Node
    meanings: dict[fx.Node, _Meaning] = field(default_factory=dict)
    numbers: set[fx.Node] = field(default_factory=set)
    """Factories of the places 0, 1, 2 ..., which only turn the order round."""
    back: set[fx.Node] = field(default_factory=set)
    """Where rows come back."""

    def __post_init__(self) -> None:
        self.keys = operand(self.sort, 0)
        (size,) = (size_of(s) for s in self.keys.meta["val"].shape) if self._is_flat() else (0,)
        self.size = size
        self.track = Tracking(size, self.analysis.track.axes.facts)  # its sequence: the rows in this order
        self.rows = self.track.axes.sequence

    def _is_flat(self) -> bool:
        return bool(self.keys.meta["val"].dim() == 1)

    def follow(self) -> list[fx.Node]:
        """The user's nodes that look at other positions and need nothing done about it. Raises _Departs."""
        if not self._is_flat():
            raise _Departs(self.sort, "it sorts along one of several dimensions.")
        if not self._holds_all_rows():
            raise _Departs(self.sort, "what is sorted is not a row for each position.")
        self.meanings[self.sort] = _Meaning(_Kind.ORDER if self.sort.target in _ARGSORTS else _Kind.SORTED)
        counts = set(self._counts_of_unsorted_keys())
        for node in self.analysis.shadow.graph.nodes:
            if node in counts:
                self.meanings[node] = _Meaning(_Kind.COUNTS)
            elif node is not self.sort and any(source in self.meanings for source in node.all_input_nodes):
                self._take(node)
        if not self.back:
            raise _Departs(self.sort, "they do not come back.")
        for node in self.numbers:
            for user in node.users:
                if self.meanings.get(user) != _Meaning(_Kind.INVERSE):
                    raise _Departs(user, "the numbers of the places are used for something else as well.")
        return self._user_nodes()

    def _take(self, node: fx.Node) -> None:
        if node.op != "call_function":
            returned = next(source for source in node.all_input_nodes if source in self.meanings)
            raise _Departs(returned, f"the model returns {self.meanings[returned].kind.value}, or keeps it.")
        if node.target in _SIZES or node.target in SHAPED_LIKE:
            return  # takes a shape only
        if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            raise _Departs(node, f"`{op_name(node)}` makes a number of it.")
        meaning = self._meaning(node)
        if meaning is not None:
            self.meanings[node] = meaning

    def _user_nodes(self) -> list[fx.Node]:
        ours = {*self.meanings, *self.back, *self.numbers}
        out: dict[fx.Node, None] = {}
        for node in self.analysis.shadow.graph.nodes:
            user_node = self.analysis.user_node(node)
            if node not in ours or user_node is None or not self.analysis.mixes(node):
                continue
            for other in mixing_nodes(self.analysis, user_node):
                if other not in ours:
                    raise _Departs(other, "it looks at other positions besides.")
            if uses_of_length(self.analysis, user_node) & VALUES:
                raise _Departs(node, f"`{op_name(node)}` takes a number from the length.")
            out[user_node] = None
        return list(out)

    # --------------------------------------------------------------------------------------------- what a value is

    def _meaning(self, node: fx.Node) -> _Meaning | None:
        """What an op makes of values of the region; None for rows that are back."""
        target = node.target
        kinds = {self.meanings[n].kind for n in node.all_input_nodes if n in self.meanings}
        if target is operator.getitem:
            return self._one_of_several(node)
        if target in (aten.index.Tensor, aten.index_select.default, aten.gather.default):
            picked = self._picked(node)
            if picked is not None:
                return picked if picked.kind is _Kind.ROWS else None
        if target in (aten.index_put.default, aten.index_add.default):
            return self._put(node)
        if target in (*_SORTS, *_ARGSORTS) and kinds == {_Kind.ORDER}:
            if self.meanings[operand(node, 0)].by != 1 or argument(node, "descending", False):
                raise _Departs(node, "the order is sorted in a way that does not turn it round.")
            return _Meaning(_Kind.SORTED_ORDER if target in _SORTS else _Kind.INVERSE)
        if target in _FLOOR and kinds == {_Kind.ORDER}:
            return self._divided(node)
        made = _COUNTING.get(target)
        if made is not None and kinds == {made[0]} and node.meta["val"].dtype in _ORDERED_TYPES:
            return _Meaning(made[1])
        if is_grouped_product(target):
            self._check_groups(node)
        elif target in _SAME and not kinds & {*_ROWWISE}:
            if node.meta["val"].dtype not in _ORDERED_TYPES:
                raise _Departs(node, f"{next(iter(kinds)).value}, as numbers of another type.")
            return self.meanings[operand(node, 0)]
        elif not kinds <= {*_ROWWISE}:
            (kind, *_) = sorted(kinds - {*_ROWWISE}, key=lambda kind: kind.value)
            raise _Departs(
                node, f"`{op_name(node)}` computes with {kind.value}, which is another one on a slice."
            )
        return self._row_by_row(node)

    def _one_of_several(self, node: fx.Node) -> _Meaning:
        source, which = operand(node, 0), node.args[1]
        kind = self.meanings[source].kind
        if kind is _Kind.SEVERAL:
            self.track.out(node, self.track.dims_of_output(source, which))  # type: ignore[arg-type]
            self._check_rows(node, [self.track.dims(node)])
            return _Meaning(_Kind.ROWS)
        if kind is _Kind.SORTED_ORDER:
            if which != 1:
                raise _Departs(
                    node, "the order is sorted, and its places are numbers that are others on a slice."
                )
            return _Meaning(_Kind.INVERSE)
        if which == 0:
            self.track.out(node, ((self.rows,),))
            return _Meaning(_Kind.KEYS)
        return _Meaning(_Kind.ORDER)

    def _divided(self, node: fx.Node) -> _Meaning:
        by, meaning = node.args[1], self.meanings[operand(node, 0)]
        mode = _FLOOR[node.target]  # type: ignore[index]
        if not isinstance(by, int) or by < 1 or (mode and argument(node, "rounding_mode") != mode):
            raise _Departs(node, f"`{op_name(node)}` computes with {meaning.kind.value}.")
        return _Meaning(_Kind.ORDER, meaning.by * by)

    def _picked(self, node: fx.Node) -> _Meaning | None:
        """Rows picked in this order, or picked back; None if the index is none of the order's."""
        source, index, dim = self._index(node)
        meaning = self.meanings.get(index) if index is not None else None
        if meaning is None or meaning.kind not in (_Kind.ORDER, _Kind.INVERSE):
            return None
        if meaning.kind is _Kind.ORDER:
            if source in self.meanings or not self._is_aligned(source, dim, meaning.by):
                raise _Departs(node, "rows are picked by this order from a value that does not have them.")
            dims = [self.track.axes.fresh(size_of(s), "own") for s in source.meta["val"].shape]
            dims[dim] = (self.rows,)
            self.track.out(node, tuple(dims))
            return _Meaning(_Kind.ROWS)
        if self._kind(source) not in (_Kind.ROWS, _Kind.KEYS) or not self._are_rows(
            self.track.dims(source)[dim]
        ):
            raise _Departs(
                node, "the inverse of the order is used on something else than rows in this order."
            )
        self._rows_come_back(node, dim)
        return _Meaning(_Kind.INVERSE)

    def _index(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None, int]:
        """What is indexed, by what, along which dimension; None with several indices."""
        source = operand(node, 0)
        if node.target is aten.index.Tensor or node.target is aten.index_put.default:
            indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
            given = [i for i, index in enumerate(indices) if index is not None]
            if len(given) != 1 or indices[given[0]].meta["val"].dim() != 1:
                return source, None, 0
            return source, indices[given[0]], given[0]
        index, dim = argument(node, "index"), argument(node, "dim") % max(source.meta["val"].dim(), 1)
        flat = node.target is not aten.gather.default or source.meta["val"].dim() == 1
        return source, index if flat else None, dim

    def _put(self, node: fx.Node) -> _Meaning | None:
        """Rows that are put or added where their positions are; or the order turned round."""
        into, index, dim = self._index(node)
        meaning = self.meanings.get(index) if index is not None else None
        adds = node.target is aten.index_add.default
        value = operand(node, 3 if adds else 2)
        if meaning is None or meaning.kind is not _Kind.ORDER or into in self.meanings:
            raise _Departs(node, "rows are put somewhere else than where they came from.")
        if not adds and argument(node, "accumulate", False):
            adds = True
        if not adds and meaning.by != 1:
            raise _Departs(node, "several rows are put in one place, and the last one stays.")
        if not self._is_aligned(into, dim, meaning.by, exactly=True):
            raise _Departs(node, "rows are put into a value that does not have a row for each position.")
        if value not in self.meanings:
            if adds or not self._are_places(value):
                raise _Departs(node, "a value that is not in this order is put where the rows came from.")
            self.numbers.add(value)
            return _Meaning(_Kind.INVERSE)
        at = dim - into.meta["val"].dim() + value.meta["val"].dim()
        if self._kind(value) not in (_Kind.ROWS, _Kind.KEYS) or not self._are_rows(
            self.track.dims(value)[at]
        ):
            raise _Departs(node, "what is put where the rows came from is not in their order.")
        self._rows_come_back(node, dim)
        return None

    def _check_groups(self, node: fx.Node) -> None:
        """The rows of each key are multiplied with the weights of that key."""
        ends = argument(node, "offs")
        if self.meanings.get(ends) != _Meaning(_Kind.ENDS):
            raise _Departs(node, "rows are grouped by something else than counts of what they are sorted by.")
        if argument(self.sort, "descending", False):
            raise _Departs(node, "the groups are in ascending order of what is sorted in descending order.")
        histc = ends
        while histc.target is not aten.histc.default:
            histc = operand(histc, 0)
        low, high, bins = (
            argument(histc, name, default) for name, default in (("min", 0), ("max", 0), ("bins", 100))
        )
        if not all(isinstance(each, int | float) for each in (low, high, bins)) or (
            bins > 1 and not low < high
        ):
            raise _Departs(histc, "its bins depend on the values.")
        # rows below the first bin would be counted nowhere, and all groups would begin too early
        if low < high and not _lower_bound(self.keys) >= low:
            raise _Departs(histc, f"it is not known that all keys are {low} at least.")
        if any(n in self.meanings for n in node.all_input_nodes if n not in (operand(node, 0), ends)):
            raise _Departs(node, "the weights of the groups are rows themselves.")

    def _row_by_row(self, node: fx.Node) -> _Meaning:
        """An op that does the same to every row, whatever its place. Raises _Departs."""
        outside = [n for n in tensors(node) if n not in self.meanings]
        for source in outside:
            if self.analysis.track.sequence_dims(source):
                raise _Departs(
                    node, f"`{op_name(node)}` combines rows in this order with rows in another one."
                )
            sizes = [size_of(s) for s in source.meta["val"].shape]
            self.track.out(source, self.track.fresh_dims(sizes, "outside"))
        visit(self.track, node)
        if node in self.track.problems or node in self.track.misaligned:
            raise _Departs(node, f"`{op_name(node)}` is not followed.")
        for action in self.track.acts_along_sequence(node):
            if action.kind != "group" or not is_grouped_product(node.target):
                raise _Departs(node, f"`{op_name(node)}` looks at other rows in this order ({action.kind}).")
        for source in outside:
            if self.track.sequence_dims(source):
                raise _Departs(
                    node, f"`{op_name(node)}` takes something from the place of a row in this order."
                )
        if isinstance(node.meta["val"], torch.Tensor):
            self._check_rows(node, [self.track.dims(node)])
            keys = node.target in _SAME and self._kind(operand(node, 0)) is _Kind.KEYS
            return _Meaning(_Kind.KEYS if keys and node.meta["val"].dtype in _ORDERED_TYPES else _Kind.ROWS)
        count = len(node.meta["val"])
        self._check_rows(node, [self.track.dims_of_output(node, i) for i in range(count)])
        return _Meaning(_Kind.SEVERAL)

    def _check_rows(self, node: fx.Node, outputs: list[Dims]) -> None:
        """All rows are there, once, and not taken apart."""
        if self.track.axes.flat((self.rows,)) != (self.rows,):
            raise _Departs(node, f"`{op_name(node)}` takes the rows apart by their places.")
        for dims in outputs:
            along = [atom for dim in dims for atom in self.track.axes.flat(dim) if atom.sequence]
            if along != [self.rows]:
                raise _Departs(node, f"`{op_name(node)}` does not keep a row for each place.")

    # -------------------------------------------------------------------------------------------------- small ones

    def _kind(self, node: fx.Node) -> _Kind | None:
        meaning = self.meanings.get(node)
        return None if meaning is None else meaning.kind

    def _are_rows(self, dim: Dim) -> bool:
        return self.track.axes.flat(dim) == (self.rows,)

    def _rows_come_back(self, node: fx.Node, dim: int) -> None:
        if not self._is_aligned(node, dim, None, exactly=True):
            raise _Departs(node, "the rows come back, but what has them is not followed along the sequence.")
        self.back.add(node)

    def _original(self) -> Dim:
        return self.analysis.track.axes.flat(self.analysis.track.dims(self.keys)[0])

    def _holds_all_rows(self) -> bool:
        axes = self.analysis.track.axes
        along = tuple(atom for atom in self._original() if atom.sequence)
        return bool(along) and along == axes.flat((axes.sequence,))

    def _is_aligned(self, value: fx.Node, dim: int, by: int | None, *, exactly: bool = False) -> bool:
        """Row i // `by` of the value's dimension is of the same position as row i of what was sorted; whatever `by` is
        where it is None. `exactly`: no other dimension runs along the sequence."""
        axes, track = self.analysis.track.axes, self.analysis.track
        original, flat = self._original(), axes.flat(track.dims(value)[dim])
        if exactly and track.sequence_dims(value) != [dim]:
            return False
        outer = 1 + max(i for i, atom in enumerate(original) if atom.sequence)
        if flat[:outer] != original[:outer] or any(atom.sequence for atom in flat[outer:]):
            return False
        inner, of = (axes.size(each[outer:]) for each in (flat, original))
        return by is None or same_size(inner * by, of)

    def _are_places(self, value: fx.Node) -> bool:
        """0, 1, 2 ..., a number for each place."""
        if value.target is aten.arange.default:
            return same_size(size_of(value.meta["val"].shape[0]), self.size)
        start, step = argument(value, "start", None), argument(value, "step", 1)
        whole = value.target in (aten.arange.start, aten.arange.start_step) and (start, step) == (0, 1)
        return whole and same_size(size_of(value.meta["val"].shape[0]), self.size)

    def _counts_of_unsorted_keys(self) -> Iterator[fx.Node]:
        """Counts of what is sorted, made beside the sort, that say where groups end."""
        known = _cast_from(self.keys)
        for node in self.analysis.shadow.graph.nodes:
            if node.target is not aten.histc.default or _cast_from(operand(node, 0)) is not known:
                continue
            reached, stack = set(), [node]
            while stack:
                for user in stack.pop().users:
                    if user.target in (*_SAME, aten.cumsum.default) and user not in reached:
                        reached.add(user)
                        stack.append(user)
            if any(is_grouped_product(user.target) for each in reached for user in each.users):
                yield node


def _cast_from(node: fx.Node) -> fx.Node:
    while node.target in _SAME and node.meta["val"].dtype in _ORDERED_TYPES:
        node = operand(node, 0)
    return node


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default)
_PICKS = (
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim,
)  # fmt: skip


def _lower_bound(node: fx.Node) -> float:
    """A number that none of a tensor's elements is below, as far as the ops say."""
    while node.target in (*_SAME, *_VIEWS):
        node = operand(node, 0)
    if node.target is operator.getitem and operand(node, 0).target in _PICKS and node.args[1] == 1:
        return 0
    if node.target in (aten.argmax.default, aten.argmin.default):
        return 0
    return -float("inf")
