"""Rules for ops that mix positions and can be made right: what each does about it.

`plan(analysis, user_node)` returns what would make the node's results those of the unsharded model, or None if no
rule applies; nothing is changed until the plan is applied. A rule is tried on a user node none of whose inputs
is MIXED; it looks at what the node's ATen ops do along the sequence.

    reduction over the sequence      sum over the group (for a mean: divided by its size), also of a histogram
    cross entropy, shifted or not    global sum over global count
    convolution, padding, shift      the neighbour's rows (halo)
    flip                             the slice of the rank as far from the other end (flips.py)
    arange, sums of whole numbers    the rank's offset
    rows of a table by position      the rank's rows
    first or last rows               from the rank that has them
    random values of no position     those of the first rank
    softmax, variance, norm, maximum over all ranks (composites.py, over_all_ranks.py)
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, TAKES_END_ROWS, Analysis
from zeco_compile.passes.composites import composite
from zeco_compile.passes.end_rows import is_first
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.flips import flip
from zeco_compile.passes.length import depends_on, global_number
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.losses import cross_entropy
from zeco_compile.passes.neighbours import (
    concatenation,
    convolution,
    differences,
    padding,
    rolled,
    windows,
    written_shifted,
)
from zeco_compile.passes.plans import (
    VIEWS,
    Emit,
    Plan,
    Ranks,
    bytes_of,
    is_local,
    kinds,
    mixing_nodes,
    replace_value,
    row_dim,
    settle,
    single_output,
    through_views,
)
from zeco_compile.passes.report import op_name
from zeco_compile.passes.row_by_length import row_by_length
from zeco_compile.passes.schema import WRITES, argument, operand, shape
from zeco_compile.passes.spaced_positions import spaced
from zeco_compile.passes.statistics import normalisation
from zeco_compile.passes.updates import update_by_shift

aten = torch.ops.aten
zeco = torch.ops.zeco


def plan(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The first rule that applies to a node whose inputs are LOCAL or WINDOW."""
    for rule in _RULES:
        found = rule(analysis, user_node)
        if found is not None:
            return found
    return None


_SUMS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default,
    aten.mean.default, aten.mean.dim, aten.mse_loss.default, aten.l1_loss.default, aten.histc.default,
)  # fmt: skip
_MEANS = (aten.mean.default, aten.mean.dim)


def _reduction(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = mixing_nodes(analysis, user_node)
    output = single_output(analysis, user_node)
    if len(mixing) != 1 or output is None or analysis.is_window(mixing[0]):
        return None
    (node,) = mixing
    if node.target not in _SUMS or not kinds(analysis, node) <= {"reduce", "contract"}:
        return None
    if any(
        not is_local(analysis, s) for s in node.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)
    ):
        return None
    if through_views(output) is not node or analysis.track.sequence_dims(output):
        return None
    if node.target is aten.histc.default and not _has_fixed_bins(node):
        return None
    mean = node.target in _MEANS
    if node.target in (aten.mse_loss.default, aten.l1_loss.default):
        mean = argument(node, "reduction", 1) == 1

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        total = emit.call(zeco.all_sum.default, user_node, ranks.group)
        keep = [total]
        if mean:
            total = emit.call(aten.div.Tensor, total, ranks.world_size)
            keep.append(total)
        replace_value(user_node, total, keep)
        settle(user_node)

    what = "mean of the ranks' means" if mean else "sum of the ranks' sums"
    return Plan(
        "all-reduce",
        f"{node.target.overloadpacket.__name__} over the sequence: {what}",
        apply,
        (("among all ranks", bytes_of(analysis, output)),),
    )


def _has_fixed_bins(histogram: fx.Node) -> bool:
    """With equal bounds the bins are those of the smallest and the largest value, of a slice of them here."""
    low, high = (argument(histogram, name, 0) for name in ("min", "max"))
    return isinstance(low, int | float) and isinstance(high, int | float) and low < high


_ASSERTS = (aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default)


def _range_check(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """A check of all values within an op (`F.one_hot` looks for negative classes): each rank checks its own."""
    mixing = mixing_nodes(analysis, user_node)
    group = set(analysis.shadow.groups.get(user_node, []))
    if not mixing or any(kinds(analysis, node) != {"reduce"} for node in mixing):
        return None
    stack, seen = [user for node in mixing for user in node.users], set(mixing)
    while stack:
        node = stack.pop()
        if node.target in _ASSERTS:
            continue
        if node not in group or node in analysis.shadow.tensors_made(user_node):
            return None
        if node not in seen:
            seen.add(node)
            stack += node.users
    return Plan(
        "position-local", "a check of the values: each rank checks its own", lambda ranks: settle(user_node)
    )


# ------------------------------------------------------------------------------------------------------ positions


def _positions(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = mixing_nodes(analysis, user_node)
    ranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)
    if len(mixing) != 1 or mixing[0].target not in ranges or user_node.target is not torch.arange:
        return None
    (node,) = mixing
    if single_output(analysis, user_node) is not node or not analysis.track.axes.is_whole_sequence(
        analysis.track.dims(node)[0]
    ):
        return None
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    if not isinstance(step, int | float):
        return None
    start = user_node.args[0] if len(user_node.args) > 1 else user_node.kwargs.get("start", 0)
    symbols = sympy.sympify(analysis.length).free_symbols

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        length = emit.call(aten.sym_size.int, user_node, 0)
        offset = emit.call(operator.mul, length, ranks.rank * step)
        keep = [length]
        if isinstance(start, fx.Node) and depends_on(start, symbols):  # `arange(1 - T, 1)`
            first = global_number(start, symbols, ranks.world_size, {})
            offset = emit.call(operator.add, offset, emit.call(operator.sub, first, start))
        new = emit.call(aten.add.Tensor, user_node, offset)
        replace_value(user_node, new, [*keep, new])
        settle(user_node)

    return Plan("offset", "positions start at the rank's first token", apply)


def _counts(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`mask.cumsum(1)`: running sums of whole numbers or constants, which have no gradient. Those of the earlier ranks
    are added."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.cumsum.default or user_node in analysis.shadow.writes:
        return None
    (node,) = mixing
    source, made = operand(node, 0), node.meta["val"]
    exact = not any(
        value.dtype.is_floating_point or value.dtype.is_complex for value in (source.meta["val"], made)
    )
    if not (exact or analysis.is_constant(source)):
        return None
    if single_output(analysis, user_node) is not node or not is_local(analysis, source):
        return None
    dim = argument(node, "dim") % made.dim()
    if analysis.track.sequence_dims(node) != [dim] or row_dim(analysis, node) != dim:
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        last = emit.call(aten.select.int, user_node, dim, -1)
        totals = emit.call(aten.unsqueeze.default, last, dim)
        totals = emit.call(zeco.gather_sequence.default, totals, dim, ranks.group, ranks.world_size, True)
        before = emit.call(aten.narrow.default, totals, dim, 0, ranks.rank)
        offset = emit.call(aten.sum.dim_IntList, before, [dim], True, dtype=made.dtype)
        new = emit.call(aten.add.Tensor, user_node, offset)
        replace_value(user_node, new, [last, new])
        settle(user_node)

    return Plan(
        "offset",
        "running sums of numbers without a gradient, from those of the earlier ranks on",
        apply,
        (("among all ranks", bytes_of(analysis, node, dim)),),
    )


def _table_rows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`table[:T]`, rows of something that every rank holds, read as one row per position; perhaps from some row on."""
    lookups = mixing_nodes(analysis, user_node)
    if len(lookups) != 1 or not analysis.is_table_lookup(lookups[0]):
        return None
    (node,) = lookups
    table = operand(node, 0)
    if user_node.target not in (operator.getitem, torch.narrow, "narrow"):
        return None
    if not user_node.args or not isinstance(user_node.args[0], fx.Node):
        return None
    if analysis.shadow.reads.get((user_node, user_node.args[0])) is not table:
        return None
    dim = argument(node, "dim", 0) % table.meta["val"].dim()
    first = argument(node, "start", 0) or 0
    if not isinstance(first, int) or first < 0 or argument(node, "step", 1) != 1:
        return None
    if not analysis.track.axes.is_whole_sequence(analysis.track.dims(node)[dim]):
        return None  # a row for each position of a chunk
    output, symbols = single_output(analysis, user_node), sympy.sympify(analysis.length).free_symbols
    if sympy.sympify(shape(table)[dim]).free_symbols & symbols:
        return None  # as long as this rank's slice, and some rows more
    if output is None or any(
        sympy.sympify(size).free_symbols & symbols
        for place, size in enumerate(shape(output))
        if place not in analysis.track.sequence_dims(output)
    ):
        return None  # `table[:T, :T]`: so many columns, too

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        source = operand(user_node, 0)
        whole, rows = analysis.real_length * ranks.world_size + first, shape(table)[dim]
        if isinstance(rows, int) and rows < whole:
            raise UnsupportedOp(
                op_name(user_node),
                location=user_location(user_node),
                why=f"it takes a row for each position of a table that has {rows} rows"
                f"{f', from row {first} on' if first else ''}, and the whole sequence has {whole - first} tokens.",
                hints=["make the table as long as the longest sequence, or the sequence shorter"],
                node=str(user_node),
            )
        length = emit.call(aten.sym_size.int, *_length_source(analysis))
        offset = emit.call(operator.mul, length, ranks.rank)
        # All rows of the sequence first: so every rank has the same guard, and compiles anew when the others do.
        # narrow, unlike a slice, raises where the table has too few.
        count, total = length, emit.call(operator.mul, length, ranks.world_size)
        if first:  # which the user's own call leaves out
            count, total = (emit.call(operator.add, each, first) for each in (count, total))
        everyones = emit.call(aten.narrow.default, source, dim, 0, total)
        mine = emit.call(aten.narrow.default, everyones, dim, offset, count)
        user_node.replace_input_with(source, mine)
        settle(user_node)

    return Plan("offset", "rows of a table, from the rank's first position on", apply)


def _length_source(analysis: Analysis) -> tuple[fx.Node, int]:
    for each in analysis.inputs:
        if each.along is not None:
            return each.node, each.along
    raise AssertionError("an analysis has an input along the sequence")


# ------------------------------------------------------------------------------------------------ single positions


def _rows_of_all(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x[:, 0]`, `x[:, -1]`, `x[:, :2]`, `x[:, T - 3 :]`: one row or a few at an end of the sequence."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target not in (aten.select.int, aten.slice.Tensor):
        return None
    (node,) = mixing
    output, source = single_output(analysis, user_node), operand(node, 0)
    if output is None or row_dim(analysis, source) is None or not _is_taken_from(output, node):
        return None
    if analysis.track.sequence_dims(output):
        return None
    if node.target is aten.slice.Tensor and kinds(analysis, node) != {"rows"}:
        return None
    if node.users and all(user.target in SHAPED_LIKE for user in node.users):
        return Plan("position-local", "read for its shape alone", lambda ranks: settle(user_node))
    first = _is_first(analysis, node)
    if first is None or _is_written_while_read(analysis, user_node):
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        owner = 0 if first else ranks.world_size - 1
        new = emit.call(zeco.from_rank.default, user_node, owner, ranks.group)
        replace_value(user_node, new, [new])
        settle(user_node)
        user_node.meta[TAKES_END_ROWS] = True

    rows = "token" if node.target is aten.select.int else "rows"
    return Plan(
        "from owner",
        f"the {'first' if first else 'last'} {rows}, from the rank that has {'it' if rows == 'token' else 'them'}",
        apply,
        (("among all ranks", bytes_of(analysis, output)),),
    )


def _is_written_while_read(analysis: Analysis, user_node: fx.Node) -> bool:
    """Its memory is written to while it is still read, or through it: another tensor in its place would not show it."""
    memory = analysis.shadow.memory
    own = memory.get(user_node, frozenset())
    order = {n: i for i, n in enumerate(analysis.gm.graph.nodes)}
    last, aliases = order[user_node], [user_node]
    for alias in aliases:
        for user in alias.users:
            last = max(last, order[user])
            if user not in aliases and not own.isdisjoint(memory.get(user, frozenset())):
                aliases.append(user)
    return any(
        order[user_node] < order.get(writer, -1) <= last and not own.isdisjoint(written)
        for writer, written in analysis.shadow.writes.items()
    )


def _is_first(analysis: Analysis, node: fx.Node) -> bool | None:
    """Whether a number of rows that does not depend on the length is counted from the first one or from the last one;
    None if from neither. The trace holds for slices that have these rows.

    With a constant length any number but 0 and -1 may be a step of a loop over the slice, or have been computed from
    the length: the trace of the whole sequence shows it, and is another program where there is such a loop.
    """
    source, dim = operand(node, 0), argument(node, "dim", 0) % operand(node, 0).meta["val"].dim()
    size = shape(source)[dim]
    one = node.target in (aten.select.int, aten.select_scatter.default)
    if isinstance(analysis.length, int):
        other = analysis.at_whole_length(node) if analysis.at_whole_length is not None else None
        if other is None:
            at_end = one and is_local(analysis, source) and argument(node, "index") in (0, -1)
            return argument(node, "index") == 0 if at_end else None
        return is_first(node, other)
    if not one:
        count = shape(node if node.target is aten.slice.Tensor else operand(node, 1))[dim]
        if not isinstance(count, int) or analysis.track.number(argument(node, "step", 1)) != 1:
            return None
        before, behind = analysis.track.cut(node, size, count)
    else:
        index = analysis.track.number(argument(node, "index"))
        before = index + size if isinstance(index, int) and index < 0 else index
        behind = analysis.track.axes.facts.simplify(sympy.sympify(size) - before)
    if isinstance(before, int):
        return True
    return False if isinstance(behind, int) else None


def _is_taken_from(output: fx.Node, node: fx.Node) -> bool:
    """What a call returned is a part of these rows, and nothing was done to it."""
    while output is not node:
        if output.target not in (*VIEWS, aten.slice.Tensor, aten.select.int):
            return False
        output = operand(output, 0)
    return True


def _written_rows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`y[:, 0] = 0`, `y[:, -2:] = v`: rows at an end of the sequence are written where they are."""
    if user_node.target is not operator.setitem or not isinstance(user_node.args[0], fx.Node):
        return None
    mixing = mixing_nodes(analysis, user_node)
    if not mixing or mixing[-1].target not in WRITES:
        return None
    *reads, node = mixing
    if kinds(analysis, node) != {"scatter"}:
        return None
    into, rows = operand(node, 0), operand(node, 1)
    read = (aten.select.int, aten.slice.Tensor)
    if any(n.target not in read or through_views(operand(n, 0)) is not through_views(into) for n in reads):
        return None
    dim = argument(node, "dim", 0) % into.meta["val"].dim()
    whole = analysis.track.axes.is_whole_sequence(analysis.track.dims(into)[dim])
    if not whole or not is_local(analysis, into) or analysis.track.sequence_dims(rows):
        return None
    first = _is_first(analysis, node)
    value = user_node.args[2]
    if first is None or (isinstance(value, fx.Node) and not analysis.shadow.tensors_read(user_node, value)):
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        target, index, value = user_node.args  # as they are by then
        old = emit.call(operator.getitem, target, index)
        dtype = into.meta["val"].dtype
        new = (
            emit.call(aten.to.dtype, value, dtype)
            if isinstance(value, fx.Node)
            else emit.call(torch.full_like, old, value)
        )
        here = emit.call(zeco.at_rank.default, old, 0 if first else ranks.world_size - 1, ranks.group)
        user_node.args = (target, index, emit.call(torch.where, here, new, old))
        settle(user_node)
        user_node.meta[TAKES_END_ROWS] = old.meta[TAKES_END_ROWS] = True

    return Plan(
        "at owner", f"the {'first' if first else 'last'} row(s) are written by the rank that has them", apply
    )


# -------------------------------------------------------------------------------------------------------- chance


def _drawn_for_all(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`torch.rand(B, 1, 1)`, dropout of a pooled vector: random values that are of no position. The ranks' generators
    may stand at different numbers, so that of the first rank is everybody's; so is its mask, in the backward, too."""
    mixing = mixing_nodes(analysis, user_node)
    output = single_output(analysis, user_node)
    if not mixing or not all(map(analysis.is_drawn_for_all, mixing)) or output is None:
        return None
    if any(map(analysis.own_mixing, mixing)):  # attention counts as random, for its dropout
        return None
    if analysis.track.sequence_dims(output):
        return None
    written = analysis.shadow.writes.get(user_node, frozenset())
    if not written <= analysis.shadow.memory.get(user_node, frozenset()):
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        new = emit.call(zeco.from_rank.default, user_node, 0, ranks.group)
        if written:  # whoever holds the memory that was drawn into
            emit.call(aten.copy_.default, user_node, new)
        else:
            replace_value(user_node, new, [new])
        settle(user_node)

    return Plan(
        "same on all ranks",
        "random values that are of no position: those of the first rank",
        apply,
        (("among all ranks", bytes_of(analysis, output)),),
    )


_RULES: tuple[Callable[[Analysis, fx.Node], Plan | None], ...] = (
    _reduction,
    _range_check,
    cross_entropy,
    convolution,
    padding,
    concatenation,
    written_shifted,
    update_by_shift,
    windows,
    rolled,
    flip,
    differences,
    _positions,
    spaced,
    _counts,
    _table_rows,
    _rows_of_all,
    row_by_length,
    _written_rows,
    _drawn_for_all,
    normalisation,
    composite,
)
