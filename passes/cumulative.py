"""Rules for cumulative sums, products, extremes and log-sum-exps along the sequence: each rank carries on where the
ranks before it have ended.

    totals   what a rank's own rows come to, one row a rank, gathered
    carry    what those of the ranks before come to
    result   the rank's own rows, cumulated from there on

All of it is made of differentiable ops, so that the gradient is that of the whole sequence. `cumulative` is the rule
for one call; between two flips (flips.py) it runs backwards, and the ranks behind come first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    mixing_nodes,
    row_dim,
    substitute,
    window_of,
)
from zeco_compile.passes.schema import argument, operand

aten = torch.ops.aten
zeco = torch.ops.zeco


def cumulative(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """A call that cumulates along the sequence. The sequence may be longer by some rows in front or behind, as padding
    makes it; it may not be a part of the slices' rows."""
    found = Cumulative.of(analysis, user_node)
    if found is None or analysis.state(found.source) is State.MIXED:
        return None
    return Plan(
        "carry",
        f"{found.name} along the sequence, from those of the earlier ranks on",
        lambda ranks: found.apply(ranks, backwards=False),
        (("among all ranks", found.sent),),
    )


@dataclass(frozen=True)
class Cumulative:
    """A call of the user's that is one ATen op along the sequence; `window` are the rows that its tensor has in front
    of the slice's and behind them."""

    user_node: fx.Node
    node: fx.Node
    read: fx.Node
    source: fx.Node
    dim: int
    window: tuple[int, int]
    sent: int

    @classmethod
    def of(cls, analysis: Analysis, user_node: fx.Node) -> Cumulative | None:
        mixing = mixing_nodes(analysis, user_node)
        if len(mixing) != 1 or mixing[0].target not in _EMITTERS or user_node in analysis.shadow.writes:
            return None
        (node,) = mixing
        made = analysis.shadow.value.get(user_node)
        several = node.target in (aten.cummax.default, aten.cummin.default)
        if several:
            if not isinstance(made, list | tuple) or len(made) != len(_RESULTS):
                return None
            if any(result_taken(user) is None for user in user_node.users):
                return None
        elif made is not node:
            return None
        read = user_node.args[0] if user_node.args else user_node.kwargs.get("input")
        source = analysis.shadow.reads.get((user_node, read)) if isinstance(read, fx.Node) else None
        if not isinstance(read, fx.Node) or not isinstance(source, fx.Node):
            return None
        group, given = set(analysis.shadow.groups[user_node]), operand(node, 0)
        if given is not source and not (
            given.target is aten._to_copy.default and given in group and operand(given, 0) is source
        ):
            return None  # autocast converts it first
        rank = source.meta["val"].dim()
        dim, window = row_dim(analysis, source), window_of(analysis, source)
        if dim is None or window is None or argument(node, "dim") % rank != dim:
            return None
        before, behind = window
        if not (isinstance(before, int) and isinstance(behind, int)) or before < 0 or behind < 0:
            return None  # rows of every slice are left out
        dtype = _dtype(node)
        if dtype is torch.bool and not several:
            return None
        if dtype.is_complex and node.target is aten.logcumsumexp.default:
            return None
        sent = bytes_of(analysis, source, dim) // source.meta["val"].dtype.itemsize * _wide(dtype).itemsize
        return cls(user_node, node, read, source, dim, (before, behind), sent)

    @property
    def name(self) -> str:
        return str(self.node.target.overloadpacket.__name__)  # type: ignore[union-attr]

    def apply(self, ranks: Ranks, backwards: bool) -> None:
        emit = Emit(self.user_node, after=False)
        rows = _Rows(emit, ranks, self.dim, self.window, self.source.meta["val"].dim(), backwards)
        read = self.user_node.args[0] if self.user_node.args else self.user_node.kwargs["input"]
        dtype = _dtype(self.node)
        x = emit.call(aten.to.dtype, read, _wide(dtype))  # as it is by then
        emitter = _EMITTERS[self.node.target]
        if not isinstance(emitter, _Extreme):
            substitute(self.user_node, emit.call(aten.to.dtype, emitter(rows, x), dtype))
            return
        readers = [(user, result_taken(user)) for user in self.user_node.users]
        values, indices = emitter(rows, x, with_indices=any(place == 1 for _, place in readers))
        values = emit.call(aten.to.dtype, values, dtype)
        for user, place in readers:
            new = indices if place == 1 else values
            assert new is not None, "somebody reads the indices"
            substitute(user, new)
        self.user_node.graph.erase_node(self.user_node)


def _dtype(node: fx.Node) -> torch.dtype:
    made = node.meta["val"]
    return (made if isinstance(made, torch.Tensor) else made[0]).dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Halves are cumulated in float32 and rounded once, as PyTorch does it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_RESULTS = ("values", "indices")


def result_taken(user: fx.Node) -> int | None:
    """Which of two results a reader takes; None if it is no such reader."""
    place = user.args[1] if user.target in (operator.getitem, getattr) else None
    if isinstance(place, str) and place in _RESULTS:
        return _RESULTS.index(place)
    return place if isinstance(place, int) and 0 <= place < len(_RESULTS) else None


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor along dimension `dim` of `rank`, and one row from each rank."""

    emit: Emit
    ranks: Ranks
    dim: int
    window: tuple[int, int]
    rank: int
    backwards: bool

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit.call(target, *args, **kwargs)

    def own(self, x: fx.Node) -> fx.Node:
        """The rows that are counted as this rank's: as many as its slice has, the first ones."""
        more = sum(self.window)
        return self.call(aten.slice.Tensor, x, self.dim, 0, -more) if more else x

    def last(self, x: fx.Node) -> fx.Node:
        """The last of this rank's rows, [.., 1, ..]."""
        row = self.call(aten.select.int, x, self.dim, -1 - sum(self.window))
        return self.call(aten.unsqueeze.default, row, self.dim)

    def gathered(self, total: fx.Node) -> fx.Node:
        """One row of each rank, [.., ranks, ..]."""
        ranks = self.ranks
        return self.call(zeco.gather_sequence.default, total, self.dim, ranks.group, ranks.world_size, True)

    def before(self, total: fx.Node, neutral: float) -> fx.Node:
        """One row of each rank: that of those which come before this one, `neutral` for the others."""
        ranks = self.ranks
        # Not only the rows that are needed: on a rank that needs none nothing would be left of the exchange.
        earlier = self.call(zeco.ranks_before.default, total, self.backwards, ranks.group, ranks.world_size)
        shape = [1] * self.rank
        shape[self.dim] = ranks.world_size
        earlier = self.call(aten.reshape.default, earlier, shape)
        return self.call(torch.where, earlier, self.gathered(total), neutral)

    @property
    def place(self) -> int:
        """How many ranks come before this one."""
        return self.ranks.world_size - 1 - self.ranks.rank if self.backwards else self.ranks.rank

    def in_order(self, everyones: fx.Node) -> fx.Node:
        """One row of each rank, those that come first in front."""
        return self.call(torch.flip, everyones, [self.dim]) if self.backwards else everyones

    def just_before(self, ordered: fx.Node) -> fx.Node:
        """The row of the rank that comes before this one; any on the first, [.., 1, ..]."""
        return self.call(aten.narrow.default, ordered, self.dim, max(self.place - 1, 0), 1)

    def is_first(self, like: fx.Node) -> fx.Node:
        first = self.ranks.world_size - 1 if self.backwards else 0
        return self.call(zeco.at_rank.default, like, first, self.ranks.group)


def _sum(rows: _Rows, x: fx.Node) -> fx.Node:
    local = rows.call(torch.cumsum, x, rows.dim)
    carry = rows.call(torch.sum, rows.before(rows.last(local), 0), [rows.dim], True)
    return rows.call(torch.add, local, carry)


def _product(rows: _Rows, x: fx.Node) -> fx.Node:
    local = rows.call(torch.cumprod, x, rows.dim)
    carry = rows.call(torch.prod, rows.before(rows.last(local), 1), rows.dim, True)
    return rows.call(torch.mul, local, carry)


def _log_sum_exp(rows: _Rows, x: fx.Node) -> fx.Node:
    """The carry goes into the first row, not on top of the result: rows of -inf at the start of a slice are none at
    the start of the sequence, and PyTorch's gradient is NaN where all rows so far are -inf."""
    earlier = rows.before(_total(rows, rows.own(x)), -torch.inf)
    first = rows.call(aten.slice.Tensor, x, rows.dim, 0, 1)
    first = _total(rows, rows.call(torch.cat, [earlier, first], rows.dim))
    first = rows.call(aten.select.int, first, rows.dim, 0)
    x = rows.call(aten.select_scatter.default, x, first, rows.dim, 0)
    return rows.call(torch.logcumsumexp, x, rows.dim)


def _total(rows: _Rows, x: fx.Node) -> fx.Node:
    """The log of the sum of exp(x), [.., 1, ..]; where all are -inf, so is it, and the gradient is zero."""
    largest = rows.call(aten.amax.default, rows.call(aten.detach.default, x), [rows.dim], True)
    largest = rows.call(torch.where, rows.call(torch.isinf, largest), 0, largest)
    total = rows.call(torch.exp, rows.call(torch.sub, x, largest))
    total = rows.call(torch.sum, total, [rows.dim], True)
    nothing = rows.call(torch.eq, total, 0)
    log = rows.call(torch.log, rows.call(torch.where, nothing, 1, total))
    return rows.call(torch.where, nothing, -torch.inf, rows.call(torch.add, log, largest))


@dataclass(frozen=True)
class _Extreme:
    """Of equal values the last one counts, and a NaN counts as the most extreme of all: both as PyTorch has it."""

    cumulate: Callable[..., Any]
    beats: Callable[..., Any]

    def __call__(self, rows: _Rows, x: fx.Node, with_indices: bool) -> tuple[fx.Node, fx.Node | None]:
        local = rows.call(self.cumulate, x, rows.dim)
        values = rows.call(operator.getitem, local, 0)
        earlier = rows.call(self.cumulate, rows.in_order(rows.gathered(rows.last(values))), rows.dim)
        carry, which = (rows.just_before(rows.call(operator.getitem, earlier, i)) for i in (0, 1))
        mine = rows.call(torch.logical_or, rows.is_first(x), rows.call(self.beats, values, carry))
        mine = rows.call(torch.logical_or, mine, rows.call(torch.isnan, values))
        found = rows.call(torch.where, mine, values, carry)
        if not with_indices:
            return found, None
        # counted from the start of the whole sequence
        length = rows.call(operator.sub, rows.call(aten.sym_size.int, x, rows.dim), sum(rows.window))
        start = rows.call(operator.mul, length, rows.place)
        indices = rows.call(torch.add, rows.call(operator.getitem, local, 1), start)
        at = rows.in_order(rows.gathered(rows.last(indices)))
        at = rows.call(torch.gather, at, rows.dim, which)
        return found, rows.call(torch.where, mine, indices, at)


_EMITTERS: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: _sum,
    aten.cumprod.default: _product,
    aten.logcumsumexp.default: _log_sum_exp,
    aten.cummax.default: _Extreme(torch.cummax, torch.ge),
    aten.cummin.default: _Extreme(torch.cummin, torch.le),
}
"""Of the tensor (in the dtype of the result, float32 for halves) the result; of extremes values and indices."""

CUMULATIVE = frozenset(_EMITTERS)
