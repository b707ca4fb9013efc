"""A row whose number is computed from the length, `y[:, T // 2]`: from the rank that has it."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.end_rows import ends
from zeco_compile.passes.length import depends_on, global_number
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    is_local,
    mixing_nodes,
    replace_value,
    settle,
    single_output,
)
from zeco_compile.passes.schema import argument, operand

aten = torch.ops.aten
zeco = torch.ops.zeco


def row_by_length(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = mixing_nodes(analysis, user_node)
    if (
        user_node.target is not operator.getitem
        or len(mixing) != 1
        or mixing[0].target is not aten.select.int
    ):
        return None
    (node,) = mixing
    output, source = single_output(analysis, user_node), operand(node, 0)
    dim = argument(node, "dim") % source.meta["val"].dim()
    if output is None or not is_local(analysis, source) or output.meta["val"].dtype is torch.bool:
        return None
    if not analysis.track.axes.is_whole_sequence(analysis.track.dims(source)[dim]):
        return None
    if analysis.track.sequence_dims(output) or analysis.shadow.is_written_to(user_node):
        return None
    place = _place_of_number(user_node, argument(node, "index"))
    if place is None:
        return None
    apply = (
        _at_constant_length(analysis, user_node, node, place)
        if isinstance(analysis.length, int)
        else _at_any_length(analysis, user_node, node, place, dim)
    )
    if apply is None:
        return None
    return Plan(
        "from owner",
        "a row whose number comes from the length, from the rank that has it",
        apply,
        (("among all ranks", bytes_of(analysis, output)),),
    )


def _place_of_number(user_node: fx.Node, index: Any) -> int | None:
    """Where in the tuple of a `getitem` the row's number is, if it is the only one there."""
    given = user_node.args[1]
    if not isinstance(given, tuple) or any(each is Ellipsis or each is None for each in given):
        return None
    numbers = [i for i, each in enumerate(given) if not isinstance(each, slice)]
    known = len(numbers) == 1 and (isinstance(given[numbers[0]], fx.Node) or given[numbers[0]] == index)
    return numbers[0] if known else None


def _with_number(user_node: fx.Node, place: int, number: int) -> tuple[Any, ...]:
    index: Any = user_node.args[1]
    return (*index[:place], number, *index[place + 1 :])


def _at_constant_length(analysis: Analysis, user_node: fx.Node, node: fx.Node, place: int) -> Any:
    """The row's number in the whole sequence is that of the other trace."""
    other = analysis.at_whole_length(node) if analysis.at_whole_length is not None else None
    taken = None if other is None else ends(other)
    if taken is None:
        return None
    owner, row = divmod(taken[1], analysis.real_length)

    def apply(ranks: Ranks) -> None:
        user_node.args = (user_node.args[0], _with_number(user_node, place, row))
        new = Emit(user_node, after=True).call(zeco.from_rank.default, user_node, owner, ranks.group)
        replace_value(user_node, new, [new])
        settle(user_node)

    return apply


def _at_any_length(analysis: Analysis, user_node: fx.Node, node: fx.Node, place: int, dim: int) -> Any:
    """The row's number is computed again from the length of the whole sequence. Whether this rank has the row is no
    question to the trace, which has to be the same program on all ranks."""
    symbols = sympy.sympify(analysis.length).free_symbols
    number = user_node.args[1][place]  # type: ignore[index]
    if not isinstance(number, fx.Node) or not depends_on(number, symbols):
        return None
    device = node.meta["val"].device

    def apply(ranks: Ranks) -> None:
        whole_number = global_number(number, symbols, ranks.world_size, {})
        emit = Emit(user_node, after=False)
        x: Any = user_node.args[0]
        length = emit.call(aten.sym_size.int, x, dim)
        whole = emit.call(operator.mul, length, ranks.world_size)
        wanted = emit.call(torch.full, (1,), whole_number, dtype=torch.int64, device=device)
        wanted = emit.call(
            torch.where, emit.call(torch.lt, wanted, 0), emit.call(torch.add, wanted, whole), wanted
        )
        row = emit.call(torch.sub, wanted, emit.call(operator.mul, length, ranks.rank))
        here = emit.call(torch.logical_and, emit.call(torch.ge, row, 0), emit.call(torch.lt, row, length))
        row = emit.call(torch.where, here, row, 0)
        found = emit.call(torch.index_select, x, dim, row)
        found = emit.call(
            torch.where, emit.call(torch.reshape, here, [1] * node.meta["val"].dim() + [1]), found, 0
        )
        found = emit.call(zeco.all_sum.default, found, ranks.group)
        user_node.args = (found, _with_number(user_node, place, 0))
        settle(user_node)

    return apply
