"""`torch.linspace(0, 1, T)`: numbers spaced evenly over the whole sequence.

Dynamo makes the number of steps a constant, and with it the length. So what the whole sequence has is read off the
trace of it (zeco_compile/second_look.py): every rank makes that, and takes its own rows.
"""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    call_arguments,
    kinds,
    mixing_nodes,
    single_output,
    substitute,
)
from zeco_compile.passes.schema import argument

aten = torch.ops.aten
zeco = torch.ops.zeco

_SPACED = {torch.linspace: aten.linspace.default, torch.logspace: aten.logspace.default}
_NAMES = ("start", "end", "steps", "base")


def spaced(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = mixing_nodes(analysis, user_node)
    if user_node.target not in _SPACED or len(mixing) != 1 or analysis.at_whole_length is None:
        return None
    (node,) = mixing
    if node.target is not _SPACED[user_node.target] or kinds(analysis, node) != {"position"}:
        return None
    if single_output(analysis, user_node) is not node:
        return None
    if not analysis.track.axes.is_whole_sequence(analysis.track.dims(node)[0]):
        return None
    other = analysis.at_whole_length(node)
    if other is None or "out" in user_node.kwargs:
        return None
    there = {name: argument(other, name, argument(node, name, None)) for name in _NAMES[:3]}
    if not all(isinstance(each, int | float) for each in there.values()):
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        given = {**call_arguments(user_node, _NAMES), **there}
        whole = emit.call(user_node.target, **given)
        substitute(user_node, emit.call(zeco.slice_sequence.default, whole, 0, ranks.group, ranks.world_size))
        analysis.with_whole_numbers.add(node)

    return Plan("offset", "spaced over the whole sequence, of which the rank takes its rows", apply)
