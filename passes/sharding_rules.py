"""Rules for ops that mix positions and can be made right: what each does about it.

`plan(analysis, user_node)` returns what would make the node's results those of the unsharded model, or None if no
rule applies; nothing is changed until the plan is applied. A rule is tried on a user node none of whose inputs
is MIXED; it looks at what the node's ATen ops do along the sequence.

    reduction over the sequence      sum over the group (for a mean: divided by its size), also of a histogram
    cross entropy, shifted or not    global sum over global count
    convolution, padding, shift      the neighbour's rows (halo)
    arange, sums of whole numbers    the rank's offset
    rows of a table by position      the rank's rows
    first or last token              from the rank that has it
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.length import depends_on, global_number
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.losses import cross_entropy
from zeco_compile.passes.neighbours import concatenation, convolution, padding, written_shifted
from zeco_compile.passes.plans import (
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
from zeco_compile.passes.schema import argument, operand, shape

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
    """`mask.cumsum(1)`: running sums of whole numbers, which have no gradient. Those of the earlier ranks are added."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.cumsum.default or user_node in analysis.shadow.writes:
        return None
    (node,) = mixing
    source, made = operand(node, 0), node.meta["val"]
    exact = not any(
        value.dtype.is_floating_point or value.dtype.is_complex for value in (source.meta["val"], made)
    )
    if not exact or single_output(analysis, user_node) is not node or not is_local(analysis, source):
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
        "running sums of whole numbers, from those of the earlier ranks on",
        apply,
        (("among all ranks", bytes_of(analysis, node, dim)),),
    )


def _table_rows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`table[:T]`, rows of something that every rank holds, read as one row per position."""
    lookups = mixing_nodes(analysis, user_node)
    if len(lookups) != 1 or not analysis.is_table_lookup(lookups[0]):
        return None
    (node,) = lookups
    table = operand(node, 0)
    if analysis.length == 1:
        return None  # table[:T] and table[:1] look alike, and mean different rows
    if user_node.target is not operator.getitem or not isinstance(user_node.args[0], fx.Node):
        return None
    if analysis.shadow.reads.get((user_node, user_node.args[0])) is not table:
        return None
    dim = argument(node, "dim", 0) % table.meta["val"].dim()
    if argument(node, "start", 0) not in (0, None) or argument(node, "step", 1) != 1:
        return None
    if not analysis.track.axes.is_whole_sequence(analysis.track.dims(node)[dim]):
        return None  # a row for each position of a chunk

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        source = operand(user_node, 0)
        whole, rows = analysis.real_length * ranks.world_size, shape(table)[dim]
        if isinstance(rows, int) and rows < whole:
            raise UnsupportedOp(
                op_name(user_node),
                location=user_location(user_node),
                why=f"it takes a row for each position of a table that has {rows} rows, and the whole sequence has "
                f"{whole} tokens.",
                hints=["make the table as long as the longest sequence, or the sequence shorter"],
                node=str(user_node),
            )
        length = emit.call(aten.sym_size.int, *_length_source(analysis))
        offset = emit.call(operator.mul, length, ranks.rank)
        # All rows of the sequence first: so every rank has the same guard, and compiles anew when the others do.
        # narrow, unlike a slice, raises where the table has too few.
        everyones = emit.call(
            aten.narrow.default, source, dim, 0, emit.call(operator.mul, length, ranks.world_size)
        )
        mine = emit.call(aten.narrow.default, everyones, dim, offset, length)
        user_node.replace_input_with(source, mine)
        settle(user_node)

    return Plan("offset", "rows of a table, from the rank's first position on", apply)


def _length_source(analysis: Analysis) -> tuple[fx.Node, int]:
    for each in analysis.inputs:
        if each.along is not None:
            return each.node, each.along
    raise AssertionError("an analysis has an input along the sequence")


# ------------------------------------------------------------------------------------------------ single positions


def _single_token(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x[:, 0]` and `x[:, -1]`: any other number may be a step of a loop over the slice."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.select.int:
        return None
    (node,) = mixing
    output = single_output(analysis, user_node)
    if (
        output is None
        or not is_local(analysis, operand(node, 0))
        or row_dim(analysis, operand(node, 0)) is None
    ):
        return None
    if analysis.length == 1 or argument(node, "index") not in (0, -1):
        return None
    first = argument(node, "index") == 0

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        owner = 0 if first else ranks.world_size - 1
        new = emit.call(zeco.from_rank.default, user_node, owner, ranks.group)
        replace_value(user_node, new, [new])
        settle(user_node)

    return Plan(
        "from owner",
        f"the {'first' if first else 'last'} token, from the rank that has it",
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
    _positions,
    _counts,
    _table_rows,
    _single_token,
)
