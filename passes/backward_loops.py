"""Step loops that run from the end of the sequence, `for t in reversed(range(T))`, as loops over the flipped sequence.

Contract: `turn_around(analysis, decisions)` rewrites what such a loop reads and what it makes, and changes no value:

    x[:, t]                   is x.flip(1)[:, T - 1 - t]
    torch.stack(rows, 1)      is torch.stack(rows[::-1], 1).flip(1)
    out[:, t] = h, all rows   is out[:, T - 1 - t] = h, and out.flip(1) behind them

So the loop runs forwards, and what is made of loops knows that direction only. A loop shows by its reads: all rows of a
value are used one after the other, from the last to the first. What it makes is looked at where there is such a loop.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis
from zeco_compile.passes.checkpoints import inherit
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import modes
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.schema import argument, operand

aten = torch.ops.aten

_FEWEST = 3
"""Rows of a slice that show a direction."""


def turn_around(analysis: Analysis, decisions: list[Decision]) -> int:
    """Rewrites the graph of `analysis`; returns at how many places."""
    if not isinstance(analysis.length, int) or analysis.length < _FEWEST:
        return 0
    order = {node: i for i, node in enumerate(analysis.gm.graph.nodes)}
    mode_of = modes(analysis.gm.graph)
    sweeps = [s for s in _sweeps(analysis, order) if len({mode_of[each.node] for each in s}) == 1]
    if not sweeps:
        return 0
    for sweep in sweeps:
        first = min((each.node for each in sweep), key=order.__getitem__)
        with analysis.gm.graph.inserting_before(first):
            turned = _call(analysis, torch.flip, (sweep[0].of, [sweep[0].dim]), first)
        for each in sweep:
            each.read_from(turned, analysis.length - 1 - each.row)
        decisions.append(
            Decision(
                str(first),
                op_name(first),
                "from the end",
                user_location(first),
                "a loop from the last row to the first: one from the first to the last of the flipped sequence",
            )
        )
    made = [
        node for node in order if _turn_stack(analysis, node, order) or _turn_writes(analysis, node, order)
    ]
    return len(sweeps) + len(made)


# ---------------------------------------------------------------------------------------------------- what it reads


@dataclass(frozen=True)
class _Read:
    """`node` reads row `row` in dimension `dim` of the user's value `of`; `read_from` makes it read another."""

    node: fx.Node
    of: fx.Node
    dim: int
    row: int
    read_from: Callable[[fx.Node, int], None]


def _sweeps(analysis: Analysis, order: dict[fx.Node, int]) -> list[list[_Read]]:
    """The reads of one value that go through all its rows from the last to the first, in the order of their use."""
    reads = defaultdict[fx.Node, list[_Read]](list)
    for node in order:
        read = _read(analysis, node)
        if read is not None and read.node.users and not analysis.shadow.is_written_to(read.of):
            reads[read.of].append(read)
    found = []
    for each in reads.values():
        each.sort(key=lambda read: min(order[user] for user in read.node.users))
        begin = 0
        for i in range(1, len(each) + 1):
            if i == len(each) or each[i].row > each[i - 1].row:
                found.append(_without_ends(each[begin:i], analysis.length))
                begin = i
    return [sweep for sweep in found if sweep]


def _without_ends(sweep: list[_Read], length: Any) -> list[_Read]:
    """Without the reads of the first or the last row that belong to what comes before or behind the loop, a loop
    forwards perhaps; nothing if these are not all rows. Either end may not be read: a loop may begin with a state that
    is a row of something else, and nobody may need what the last step makes."""
    count = Counter(each.row for each in sweep)
    if len(count) < _FEWEST or not set(range(1, length - 1)) <= set(count):
        return []
    most = max(count[row] for row in range(1, length - 1))
    before, behind = max(count[length - 1] - most, 0), max(count[0] - most, 0)
    return sweep[before : len(sweep) - behind]


def _read(analysis: Analysis, node: fx.Node) -> _Read | None:
    """What reads one row of a value that has all rows of the slice, and nothing else of it."""
    held = node.args[0] if node.args else None
    made = analysis.shadow.value.get(node)
    if not isinstance(held, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target is operator.getitem and isinstance(made, fx.Node) and made.target is operator.getitem:
        return _read_of_unbound(analysis, node, held, made)
    at: int | None = None
    if node.target is operator.getitem:
        items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        at = _only_number(analysis, node, items)
    elif node.target in ("select", torch.select) and len(node.args) > 2:
        at = -1
    source = analysis.shadow.reads.get((node, held))
    taken = [n for n in analysis.shadow.groups.get(node, ()) if n.target is aten.select.int]
    if at is None or not isinstance(source, fx.Node) or len(taken) != 1 or operand(taken[0], 0) is not source:
        return None
    dim, index = argument(taken[0], "dim") % source.meta["val"].dim(), argument(taken[0], "index")
    if not _has_rows(analysis, source, dim) or not isinstance(index, int):
        return None

    def read_from(turned: fx.Node, row: int) -> None:
        if at == -1:
            node.args = (turned, node.args[1], row)
        else:
            node.args = (turned, tuple(row if i == at else item for i, item in enumerate(items)))

    return _Read(node, held, dim, index % analysis.length, read_from)


def _read_of_unbound(analysis: Analysis, node: fx.Node, held: fx.Node, made: fx.Node) -> _Read | None:
    """`x.unbind(1)[t]`."""
    unbound = operand(made, 0)
    of = held.args[0] if held.args else None
    if (
        unbound.target is not aten.unbind.int
        or not isinstance(of, fx.Node)
        or not isinstance(made.args[1], int)
    ):
        return None
    source = operand(unbound, 0)
    dim = argument(unbound, "dim", 0) % source.meta["val"].dim()
    if analysis.shadow.reads.get((held, of)) is not source or not _has_rows(analysis, source, dim):
        return None

    def read_from(turned: fx.Node, row: int) -> None:
        with node.graph.inserting_before(node):
            new = _call(analysis, aten.select.int, (turned, dim, row), node)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)

    return _Read(node, of, dim, made.args[1] % analysis.length, read_from)


def _only_number(analysis: Analysis, node: fx.Node, items: tuple[Any, ...]) -> int | None:
    """Where the one number of an index is that has nothing beside it but slices and new dimensions."""

    def is_number(item: Any) -> bool:  # that is computed from the length, perhaps: `x[:, T - 1 - i]`
        return type(item) is int or (
            isinstance(item, fx.Node) and not analysis.shadow.tensors_read(node, item)
        )

    numbers = [i for i, item in enumerate(items) if is_number(item)]
    others = [item for i, item in enumerate(items) if i not in numbers]
    known = all(item is None or item is Ellipsis or isinstance(item, slice) for item in others)
    return numbers[0] if len(numbers) == 1 and known else None


def _has_rows(analysis: Analysis, source: fx.Node, dim: int) -> bool:
    track = analysis.track
    return track.sequence_dims(source) == [dim] and track.axes.is_whole_sequence(track.dims(source)[dim])


# ---------------------------------------------------------------------------------------------------- what it makes


def _turn_stack(analysis: Analysis, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Rows that were made one after the other, from the last to the first, are put together."""
    if (
        node.target not in (torch.stack, torch.cat)
        or not node.args
        or not isinstance(node.args[0], list | tuple)
    ):
        return False
    made, rows = analysis.shadow.value.get(node), list(node.args[0])
    if len(rows) != analysis.length or not isinstance(made, fx.Node) or not _falls(rows, order):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(dim, int) or made.meta["val"].shape[dim] != analysis.length:
        return False
    if any(len(analysis.shadow.tensors_read(node, row)) != 1 for row in rows):
        return False
    node.args = (rows[::-1], *node.args[1:])
    _flip_behind(analysis, node, node, dim, lambda user: True)
    return True


def _turn_writes(analysis: Analysis, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """All rows of something new are written one after the other, from the last to the first."""
    made = analysis.shadow.value.get(node)
    if not isinstance(made, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    if not (made.target in SHAPED_LIKE or made.target in _FILLED) or not analysis.is_constant(made):
        return False
    writes = [user for user in node.users if user.target is operator.setitem and user.args[0] is node]
    writes.sort(key=order.__getitem__)
    found = [_written_row(analysis, made, write) for write in writes[: analysis.length]]
    rows = [row for row in found if row is not None]
    if [row for _, row, _ in rows] != list(range(analysis.length))[::-1] or len(
        {dim for dim, _, _ in rows}
    ) != 1:
        return False
    loop = writes[: analysis.length]
    if any(user not in loop and order[user] < order[loop[-1]] for user in node.users):
        return False
    for write, (_, row, at) in zip(loop, rows, strict=True):
        items = write.args[1] if isinstance(write.args[1], tuple) else (write.args[1],)
        index = tuple(analysis.length - 1 - row if i == at else item for i, item in enumerate(items))
        write.args = (node, index, write.args[2])
    _flip_behind(analysis, node, loop[-1], rows[0][0], lambda user: user not in loop)
    return True


_FILLED = (
    aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.full.default,
)  # fmt: skip


def _written_row(analysis: Analysis, made: fx.Node, write: fx.Node) -> tuple[int, int, int] | None:
    """(dimension, row, place in the index) of a write to all of one row."""
    items = write.args[1] if isinstance(write.args[1], tuple) else (write.args[1],)
    at = _only_number(analysis, write, items)
    if at is None or any(
        item is not Ellipsis and item != slice(None) for i, item in enumerate(items) if i != at
    ):
        return None
    written = [n for n in analysis.shadow.groups.get(write, ()) if n.target is aten.select_scatter.default]
    if len(written) != 1 or written[0].meta["val"].shape != made.meta["val"].shape:
        return None
    dim = argument(written[0], "dim") % made.meta["val"].dim()
    index = argument(written[0], "index")
    if not isinstance(index, int) or made.meta["val"].shape[dim] != analysis.length:
        return None
    return dim, index % analysis.length, at


def _falls(rows: list[Any], order: dict[fx.Node, int]) -> bool:
    places = [order.get(row, -1) if isinstance(row, fx.Node) else -1 for row in rows]
    return min(places) >= 0 and all(a > b for a, b in itertools.pairwise(places))


def _flip_behind(
    analysis: Analysis, value: fx.Node, last: fx.Node, dim: int, reads: Callable[[fx.Node], bool]
) -> None:
    with analysis.gm.graph.inserting_after(last):
        turned = _call(analysis, torch.flip, (value, [dim]), last)
    value.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned and reads(user))


def _call(analysis: Analysis, target: Any, args: tuple, like: fx.Node) -> fx.Node:
    return inherit(analysis.gm.graph.call_function(target, args), like)
