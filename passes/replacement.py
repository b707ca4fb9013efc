"""Puts the operator into the user's graph in place of a region that was recognised (recognize.py).

The operator gets exactly the values that were checked, in its own layout; its result goes back into the layout of
the user's code, the state after the last step too where it is read; what nobody reads any more is erased.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.checkpoints import keep_if_any
from zeco_compile.passes.complex_recurrences import (
    ComplexRoles,
    emit_recurrence,
    final_complex_state_scale,
)
from zeco_compile.passes.gates import Gate, emit_gate, emit_write_factor, gate_source
from zeco_compile.passes.layout import (
    Canonical,
    CanonicalAxes,
    GraphOperations,
    arrange,
    disarrange,
    promoted,
)
from zeco_compile.passes.locations import expression
from zeco_compile.passes.modes import modes
from zeco_compile.passes.plans import settle
from zeco_compile.passes.readers import reader_of_erased_writes, readers_behind
from zeco_compile.passes.recognize import Match, rounded
from zeco_compile.passes.region import (
    Region,
    same_value,
)
from zeco_compile.passes.region_report import report_region
from zeco_compile.passes.report import Region as RegionReport
from zeco_compile.passes.report import op_name
from zeco_compile.passes.roles import (
    NotLinearAttention,
    OwnTerm,
    Roles,
    final_state_scale,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Wiring:
    """How the operator is called: the group that shares the sequence and the schedule of the exchange."""

    schedule: str
    blocks: int
    group: str
    world_size: int


def replace_region(analysis: Analysis, match: Match, wiring: Wiring, number: int) -> RegionReport:
    """Puts the operator into the user's graph in place of the region, and reports what was done.

    Raises NotLinearAttention where a value that the operator needs is no longer there under any name, because
    the user's code has overwritten it.
    """
    shadow, graph = analysis.shadow, analysis.gm.graph
    region, roles = match.region, match.roles
    end = _end(analysis, region)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = readers_behind(shadow, region.output, order[end], order)
    if found is None:
        raise NotLinearAttention("its result is written to, and read under a name from before")
    readers, written_to = found
    if not readers:
        raise NotLinearAttention("nothing reads its result under a name of its own")
    state_readers, state_scale = _state_readers(analysis, match, order), 1.0
    place = _place(state_readers, order, end)
    state_readers = [each for each in state_readers if order[each[0]] > order[place]]
    if state_readers and match.detached:
        raise NotLinearAttention("its result has no gradient, and the state that is read has one")
    if state_readers:
        if isinstance(roles, ComplexRoles):
            scale = final_complex_state_scale(region, roles.axes.analysis, roles)
        else:
            scale = final_state_scale(region, roles.axes.analysis, roles)
        if scale is None:
            raise NotLinearAttention(
                "what it leaves behind for the next call is not the state of the recurrence"
            )
        state_scale = rounded(scale)
    gate: Gate = (None, None, None)
    if isinstance(roles, ComplexRoles):
        needed = list(roles.inputs)
    else:
        gate = gate_source(analysis, roles)
        needed = _needed(roles, gate)
    # What an operator has taken the place of is held by its result, and not under the old name any more.
    held = {
        value: shadow.rewritten.get(value, holder)
        for value, holder in shadow.holders(order, order[place]).items()
        if order.get(shadow.rewritten.get(value, holder), len(order)) <= order[place]
    }
    for node in needed:
        if node not in held:
            raise NotLinearAttention(
                f"the value {analysis.described(node)} that it needs has been overwritten by then"
            )
    values = {node: held[node] for node in needed}
    kept, redirected = list(values.values()), [*readers, *state_readers]
    stale = reader_of_erased_writes(shadow, graph, region.user_nodes, redirected, kept, order)
    if stale is not None:
        name = expression(stale, op_name(stale))
        raise NotLinearAttention(f"{name} reads what it writes under another name")
    dtype = region.output.meta["val"].dtype
    if isinstance(roles, Roles):
        dtype = promoted([*roles.q, *roles.k, *roles.v], dtype)

    with graph.inserting_after(place):
        anchor = graph.call_function(aten.sym_size.int, (values[needed[0]], 0))
    with graph.inserting_before(anchor):
        ops = GraphOperations(
            graph,
            lambda atom: _size_source(roles.axes, values, atom),
            next(iter(values.values())),
            dtype,
            end,
        )
        if isinstance(roles, ComplexRoles):
            wired = wiring.schedule, wiring.blocks, wiring.group
            call, o, last = emit_recurrence(ops, roles, values, bool(state_readers), wired)
        else:
            call, o, last = _emit_attention(ops, match, roles, gate, values, bool(state_readers), wiring)
        keep_if_any(call, region.user_nodes)
        if match.detached:
            o = ops.call(aten.detach.default, o)
        if written_to:  # its backward may need what it returned
            o = ops.call(aten.clone.default, o)
        if state_readers and region.final_state is not None:
            last = disarrange(ops, roles.axes, last, Canonical.STATE, region.final_state)
            last = last if state_scale == 1.0 else ops.call(aten.mul.Tensor, last, state_scale)
            last = ops.call(aten.to.dtype, last, region.final_state.meta["val"].dtype)
    graph.erase_node(anchor)
    shadow.rewritten[region.output] = o
    if state_readers and region.final_state is not None:
        shadow.rewritten[region.final_state] = last
    for user, argument in readers:
        shadow.rewritten.update(dict.fromkeys(shadow.tensors_read(user, argument), o))  # written to, others
        user.replace_input_with(argument, o)
    for user, argument in state_readers:
        user.replace_input_with(argument, last)
    _erase(analysis, region)
    return report_region(analysis, match, number, gate, end)


def _needed(roles: Roles, gate: Gate) -> list[fx.Node]:
    """The values that the operator is made from."""
    needed = [*roles.q, *roles.k, *roles.v, *(node for node in (gate[0], gate[2]) if node is not None)]
    needed += [node for node, _ in roles.gates[1:]]
    needed += roles.own.inputs if roles.own is not None else ()
    if roles.initial_state is not None:
        needed.append(roles.initial_state)
    return needed


def _emit_attention(
    ops: GraphOperations,
    match: Match,
    roles: Roles,
    gate: Gate,
    values: dict[fx.Node, fx.Node],
    final_state: bool,
    wiring: Wiring,
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(the operator, the region's output, the state after the last step in the operator's layout) at the graph's
    insertion point."""
    gate_node, gate_form, kept = gate
    seconds = roles.gates[1:]
    dtype, operand_dtype = match.region.output.meta["val"].dtype, ops.dtype
    for node, entrance in roles.entering:
        values[node] = ops.call(_ENTERED[entrance.name], values[node])
    q = arrange(ops, roles.axes, Canonical.KEY, roles.q, values)
    k = arrange(ops, roles.axes, Canonical.KEY, roles.k, values)
    v = arrange(ops, roles.axes, Canonical.VALUE, roles.v, values)
    q, k, v = (_as(ops, x, nodes, operand_dtype) for x, nodes in ((q, roles.q), (k, roles.k), (v, roles.v)))
    g = None
    if gate_node is not None and gate_form is not None:
        log = emit_gate(ops, gate_form, values[gate_node], wiring.group)
        if kept is not None:
            log = ops.call(torch.where, values[kept], log, -float("inf"))
        logs = {gate_node: log}
        g = arrange(ops, roles.axes, Canonical.GATE, [gate_node], logs)
        for node, form in seconds:
            log_too = {node: emit_gate(ops, form, values[node], wiring.group)}
            g = ops.call(torch.add, g, arrange(ops, roles.axes, Canonical.GATE, [node], log_too))
        if roles.write_factor is not None:
            factor = {gate_node: emit_write_factor(ops, roles.write_factor, logs[gate_node])}
            k = ops.multiply(k, arrange(ops, roles.axes, Canonical.KEY, [gate_node], factor))
            k = k if operand_dtype == dtype else ops.call(aten.to.dtype, k, operand_dtype)
    elif roles.constant is not None:
        like = next(iter(values.values()))
        state_dtype = torch.float64 if operand_dtype == torch.float64 else torch.float32
        heads = [
            ops.call(aten.new_full.default, like, [1], each, dtype=state_dtype) for each in roles.constant
        ]
        for each in heads:
            each.meta["zeco_fitted"] = True
        g = heads[0] if len(heads) == 1 else ops.call(torch.cat, heads)
    written = k, v, g
    if roles.before is not None:
        # What is the same at all positions has no row to be moved; one of both has.
        along = roles.axes.analysis.track.sequence_dims
        if roles.write_factor is not None or any(map(along, roles.k)):
            k = _one_later(ops, k, wiring.group)
        if any(map(along, roles.v)):
            v = _one_later(ops, v, wiring.group)
        if g is not None and roles.before == "kept":
            if roles.initial_state is not None and not roles.axes.gate_has_rows:
                # what it begins with is read as it is
                in_rows = k if any(map(along, roles.k)) else v
                g = _one_later(ops, _with_rows(ops, roles, g, in_rows), wiring.group)
            elif roles.axes.gate_has_rows:
                g = _one_later(ops, g, wiring.group)
        elif g is not None:
            decay = ops.call(torch.exp, g)
            if not roles.axes.gate_has_key:
                decay = ops.unsqueeze(decay, 1 if roles.constant is not None else 3)
            k = ops.call(aten.to.dtype, ops.multiply(k, decay), operand_dtype)
    state = None
    if roles.initial_state is not None:
        state = arrange(ops, roles.axes, Canonical.STATE, [roles.initial_state], values)
    call = ops.call(
        torch.ops.zeco.gated_linear_attention.default,
        q, k, v, g, roles.scale, state, final_state, wiring.schedule, wiring.blocks, wiring.group,
    )  # fmt: skip
    o = ops.call(operator.getitem, call, 0)
    if roles.rows is not None:
        float_dtype = torch.promote_types(operand_dtype, torch.float32)
        o = roles.rows.emit(ops, o, ops.size((roles.axes.rows,)), g, float_dtype)
        o = o if float_dtype == operand_dtype else ops.call(aten.to.dtype, o, operand_dtype)
    if roles.own is not None:
        o = _with_own_term(
            ops, roles, roles.own, o, values, torch.promote_types(operand_dtype, torch.float32)
        )
        o = ops.call(aten.to.dtype, o, operand_dtype)
    o = disarrange(ops, roles.axes, o)
    if match.length_factor is not None:  # of the slice's length as yet, as the user's own (length.py)
        from_length, multiplied = match.length_factor
        o = ops.call(torch.mul if multiplied else torch.div, o, from_length)
    if operand_dtype != dtype:
        o = ops.call(aten.to.dtype, o, dtype)
    last = o  # there are no readers of the state otherwise
    if final_state:
        last = ops.call(operator.getitem, call, 1)
        if roles.before is not None:
            last = _after_last_write(ops, roles, last, written, wiring)
    return call, o, last


_ENTERED = {"exp(z)": torch.exp, "1 / z": torch.reciprocal}
"""`roles.ENTRANCES` in the user's graph."""


def _one_later(ops: GraphOperations, x: fx.Node, group: str) -> fx.Node:
    """[B, T, ...] with each row at the next position: the first is the last one of the rank before, zeros at rank 0."""
    rows = ops.call(torch.ops.zeco.halo.default, x, 1, 1, 0, 0.0, group)
    return ops.call(aten.slice.Tensor, rows, 1, 0, -1)


def _with_rows(ops: GraphOperations, roles: Roles, g: fx.Node, in_rows: fx.Node) -> fx.Node:
    """A gate that is the same at all positions, with a row for each, [B, T, H] or [B, T, H, K]."""
    rows = ops.call(aten.zeros_like.default, ops.call(aten.select.int, in_rows, 3, 0))
    return ops.call(torch.add, ops.unsqueeze(rows, 3) if roles.axes.gate_has_key else rows, g)


def _after_last_write(
    ops: GraphOperations,
    roles: Roles,
    state: fx.Node,
    written: tuple[fx.Node, fx.Node, fx.Node | None],
    wiring: Wiring,
) -> fx.Node:
    """[B, H, K, V] behind the last token of the sequence, from the state that it reads and the k, v and gate of all."""
    k, v, g = written
    dtype = torch.promote_types(ops.dtype, torch.float32)
    k, v = (ops.call(aten.to.dtype, _of_last_token(ops, x, wiring), dtype) for x in (k, v))
    if g is not None and roles.before == "kept":
        decay = g if roles.constant is not None else _of_last_token(ops, g, wiring)
        decay = ops.call(torch.exp, ops.call(aten.to.dtype, decay, dtype))
        if not roles.axes.gate_has_key:
            decay = ops.unsqueeze(decay, -1)
        state = ops.multiply(state, ops.unsqueeze(decay, -1))
    return ops.call(torch.add, state, ops.multiply(ops.unsqueeze(k, -1), ops.unsqueeze(v, -2)))


def _of_last_token(ops: GraphOperations, x: fx.Node, wiring: Wiring) -> fx.Node:
    """[B, H, ...] of [B, T, H, ...], equal on every rank."""
    row = ops.call(aten.select.int, x, 1, -1)
    settle(row)
    return ops.call(torch.ops.zeco.from_rank.default, row, wiring.world_size - 1, wiring.group)


def _with_own_term(
    ops: GraphOperations,
    roles: Roles,
    own: OwnTerm,
    o: fx.Node,
    values: dict[fx.Node, fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """`o`, [B, T, H, V], and the own term, in at least the precision of a state."""
    wide = {node: ops.call(aten.to.dtype, values[node], dtype) for node in own.inputs}
    of_keys, term = own.arranged(ops, roles.axes, wide)
    if of_keys is not None:
        term = ops.multiply(ops.call(aten.sum.dim_IntList, of_keys, [-1], True), term)
    assert own.weight is not None, "it has been measured"
    weight = own.weight * roles.scale
    term = term if weight == 1.0 else ops.call(aten.mul.Tensor, term, weight)
    return ops.call(aten.add.Tensor, ops.call(aten.to.dtype, o, dtype), term)


def _as(ops: GraphOperations, x: fx.Node, nodes: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    made = promoted(nodes, dtype)
    return x if made == dtype else ops.call(aten.to.dtype, x, dtype)


def _size_source(axes: CanonicalAxes, values: dict[fx.Node, fx.Node], atom: Atom) -> tuple[fx.Node, int]:
    analysis = axes.analysis
    for aten_node, user_node in values.items():
        for i, dim in enumerate(analysis.track.dims(aten_node)):
            if analysis.track.axes.flat(dim) == (atom,) or (
                atom is axes.rows and analysis.track.axes.is_whole_sequence(dim)
            ):
                return user_node, i
    raise NotLinearAttention(f"no input has a dimension of the symbolic size {atom.size} by itself")


def _state_readers(
    analysis: Analysis, match: Match, order: dict[fx.Node, int]
) -> list[tuple[fx.Node, fx.Node]]:
    """Who reads the state after the last step, other than the region itself."""
    if match.region.final_state is None:
        return []
    inside = set(match.region.user_nodes)
    return [
        (user, argument)
        for (user, argument), read in analysis.shadow.reads.items()
        if isinstance(read, fx.Node)
        and same_value(read) is match.region.final_state
        and user not in inside
        and user in order
    ]


def _place(readers: list[tuple[fx.Node, fx.Node]], order: dict[fx.Node, int], end: fx.Node) -> fx.Node:
    """The node of the user's graph behind which the operator goes: the region's end, or in front of the first node
    that reads the state, if that is earlier and runs in the same mode."""
    first = min((user for user, _ in readers), key=order.__getitem__, default=end)
    if order[first] > order[end] or first is end:
        return end
    mode_of = modes(end.graph)
    return first.prev if mode_of[first.prev] == mode_of[first] == mode_of[end] else end


def _end(analysis: Analysis, region: Region) -> fx.Node:
    """The user's node behind which the region's output is there: the one that computed it, or the one before the node
    that reads it, where it is a view that was written to and is made again when it is read."""
    node = analysis.shadow.origin[region.output]
    read_by_itself = any(
        user is node and read is region.output for (user, _), read in analysis.shadow.reads.items()
    )
    return node.prev if read_by_itself else node


def left_behind(analysis: Analysis, match: Match) -> tuple[fx.Node, str] | None:
    """Once a region has been rewritten: a node of it that others still read, and that is no value of positions by
    itself, and what to say about it."""
    inside = set(match.region.user_nodes)
    for node in analysis.gm.graph.nodes:
        made = analysis.shadow.tensors_made(node) if node in inside else []
        others = [user for user in node.users if user not in inside]
        reader = next((n for n in others if n.op == "output" or analysis.shadow.groups.get(n)), None)
        if reader is None or not any(analysis.state(each) is State.MIXED for each in made):
            continue
        by = (
            "the model returns it"
            if reader.op == "output"
            else f"{expression(reader, op_name(reader))} reads it"
        )
        return node, (
            f"it lies inside of what was, which ends with {expression(_end(analysis, match.region), 'it')}, but "
            f"{by}, and it was not found to be the state of the recurrence after the last token"
        )
    return None


def _erase(analysis: Analysis, region: Region) -> None:
    """Drops the nodes of the region that nobody reads any more, writes into its own buffers included."""
    graph = analysis.gm.graph
    inside = set(region.user_nodes)
    for node in reversed(list(graph.nodes)):
        if node in inside and node.op in ("call_function", "call_method") and not node.users:
            graph.erase_node(node)
