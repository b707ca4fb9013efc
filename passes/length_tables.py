"""Tables that the code makes of the length: `F.interpolate(table, size=T)`, `F.pad` of a few learned rows to T.

Contract: `settle_length_tables(analysis, ranks, decisions)` finds values that are computed from numbers, parameters and
buffers alone, whatever the inputs are, have one row for each position (or are of no position at all), and cannot be
computed on a slice; it computes each on the whole sequence on every rank, where each takes its rows. A gradient goes
back to the rows that were taken, so that the sum over ranks is the whole. This needs the length as a symbol: with a
constant it cannot be told which numbers mean it. What rules make right as it stands (positions, the rows `table[:T]`),
and masks, which have two axes along the sequence, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis
from zeco_compile.passes.flips import FLIP
from zeco_compile.passes.length import SIZES, VALUES, depends_on, global_number, uses_of_length
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import is_transform, modes
from zeco_compile.passes.plans import Emit, Ranks, settle, settled
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.schema import is_random, shape, tensors
from zeco_compile.passes.sharding_rules import plan

aten = torch.ops.aten
zeco = torch.ops.zeco


def settle_length_tables(analysis: Analysis, ranks: Ranks, decisions: list[Decision]) -> int:
    """Rewrites the user's graph, and returns at how many places."""
    if isinstance(analysis.length, int):
        return 0
    own = _of_the_length(analysis)
    found = [(node, rows) for node in own if (rows := _rows_to_take(analysis, node, own)) is not None]
    for node, dim in found:
        _compute_whole(analysis, node, _computed_from(node, own), dim, ranks)
        what = "of no position" if dim < 0 else f"this rank's rows of dimension {dim}"
        decisions.append(
            Decision(str(node), op_name(node), "made for the whole sequence", user_location(node), what)
        )
    for node in reversed(own):
        if found and node not in analysis.shadow.writes and not node.users:
            analysis.gm.graph.erase_node(node)
    return len(found)


def _of_the_length(analysis: Analysis) -> dict[fx.Node, None]:
    """The nodes of the user's graph whose values are those of numbers, parameters and buffers, in order."""
    shadow = analysis.shadow
    whole = {each.node for each in analysis.inputs if each.along is None}
    mode_of = modes(analysis.gm.graph)
    written = {key for each in shadow.writes.values() for key in each}
    own: dict[fx.Node, None] = {}

    def is_own(node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or not shadow.tensors_made(node):
            return False
        if settled(node) or is_transform(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        if any(is_random(each) for each in shadow.groups.get(node, ())):
            return False
        for value in (node, *node.all_input_nodes):
            if not written.isdisjoint(shadow.memory.get(value, ())):
                return False  # it may be another one by then
        return all(
            source in whole
            or (source in own and mode_of[source] == mode_of[node])
            or not (shadow.tensors_read(node, source) or shadow.memory.get(source))  # a number
            for source in node.all_input_nodes
        )

    for node in analysis.gm.graph.nodes:
        if is_own(node):
            own[node] = None
    return own


def _computed_from(user_node: fx.Node, own: dict[fx.Node, None]) -> list[fx.Node]:
    """The nodes among `own` that compute it, in order, and itself."""
    found, stack = {user_node}, [user_node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in own and source not in found:
                found.add(source)
                stack.append(source)
    return [node for node in own if node in found]


def _rows_to_take(analysis: Analysis, user_node: fx.Node, own: dict[fx.Node, None]) -> int | None:
    """The dimension of its rows, -1 if it has none; None if it is not read by others, is no such table, or is right as
    it stands."""
    value = analysis.shadow.value.get(user_node)
    if not isinstance(value, fx.Node) or all(user in own for user in user_node.users):
        return None
    depends = _depends(analysis)
    rows = [dim for dim, size in enumerate(shape(value)) if depends(size)]
    if len(rows) > 1 or any(not analysis.track.axes.is_length(shape(value)[dim]) for dim in rows):
        return None
    computed = _computed_from(user_node, own)
    made = [each for node in computed for each in analysis.shadow.groups.get(node, ())]
    if any(analysis.is_pair(each) or _axes_of_length(analysis, each) > 1 for each in made):
        return None  # masks, which are made again for the keys of all
    if not any(_is_of_the_slice(analysis, node) for node in computed):
        return None
    return rows[0] if rows else -1


def _depends(analysis: Analysis) -> Callable[[object], bool]:
    symbols = sympy.sympify(analysis.length).free_symbols
    return lambda size: bool(sympy.sympify(size).free_symbols & symbols)


def _axes_of_length(analysis: Analysis, node: fx.Node) -> int:
    value = node.meta.get("val")
    return sum(map(_depends(analysis), shape(node))) if isinstance(value, torch.Tensor) else 0


_MAKERS = (aten.linspace.default, aten.logspace.default)
_SPREADS = (aten.expand.default, aten.broadcast_to.default)


def _is_of_the_slice(analysis: Analysis, user_node: fx.Node) -> bool:
    """Each rank would compute that of the first slice, and no rule says otherwise."""
    group = analysis.shadow.groups.get(user_node, [])
    depends = _axes_of_length
    if any(node.target in _MAKERS and depends(analysis, node) for node in group):
        return True
    tables = [node for node in group if not analysis.is_constant(node)]
    if not tables:
        return False
    for node in tables:
        makes = depends(analysis, node) and not any(depends(analysis, source) for source in tensors(node))
        spreads = node.target in SHAPED_LIKE or node.target in _SPREADS
        if makes and not spreads and not analysis.is_table_lookup(node):
            return True
    uses = uses_of_length(analysis, user_node)
    unclear = bool(uses) and not uses <= SIZES and not uses <= VALUES
    if unclear or not any(map(analysis.mixes, group)):
        return unclear
    found = plan(analysis, user_node)
    return found is None or found.decision == FLIP  # whose exchange is not needed


def _compute_whole(
    analysis: Analysis, user_node: fx.Node, computed: list[fx.Node], dim: int, ranks: Ranks
) -> None:
    graph, symbols = analysis.gm.graph, sympy.sympify(analysis.length).free_symbols
    emit = Emit(user_node, after=True)
    numbers: dict[fx.Node, fx.Node] = {}
    whole: dict[fx.Node, fx.Node] = {}
    for node in computed:
        for source in node.all_input_nodes:
            if depends_on(source, symbols) and source not in whole:
                whole[source] = global_number(source, symbols, ranks.world_size, numbers)
        with graph.inserting_after(emit.last):
            emit.last = graph.node_copy(node, lambda n: whole.get(n, n))
        settle(emit.last)
        whole[node] = emit.last
    new = whole[user_node]
    if dim >= 0:
        new = emit.call(zeco.slice_sequence.default, new, dim, ranks.group, ranks.world_size)
    copies = {*computed, *whole.values(), new}
    user_node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in copies)
