"""Gives loops over the sequence of which the last state alone is read a read-out, by which they can be recognised.

    for t in range(T):
        h = a[:, t] * h + b[:, t]
    return head(h)

What is recognised ends with a value that has a row for each position, and this loop has none. So the states of all
steps are put together, or where a state is larger than a token (k v^T), their sums over one of their dimensions, which
is what a query of ones reads. `zeco::last_state(rows, state)` takes the place of the state, so that those rows are
read. If linear attention is found to end with them, the state is the operator's final state, which is that of the
whole sequence on every rank; if not, the loop is left as it was. Then the rows go again.

Contract: what `open_last_states` has put into a graph computes what the graph did, and `close_last_states` leaves
nothing of it but what recognition has made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.loops import Emitter, Unable, emitter_for, log
from zeco_compile.passes.region import is_inexact
from zeco_compile.passes.report import STANDS_FOR, op_name
from zeco_compile.passes.schema import following
from zeco_compile.passes.steps import Steps

aten = torch.ops.aten
zeco = torch.ops.zeco

Tried = dict[fx.Node, int]
"""The user's node that computes a last state -> how many read-outs of it have been tried."""


@dataclass(frozen=True)
class OpenState:
    """A loop that has been given a read-out: the user's node that computes its last state, what reads both, and the
    read-out as it was put in."""

    end: fx.Node
    last: fx.Node
    rows: fx.Node


def open_last_states(analysis: Analysis, tried: Tried) -> list[OpenState]:
    """Gives each loop of which the last state alone is read the next read-out that has not been `tried`."""
    emitter = emitter_for(analysis, [])
    if emitter is None:
        return []
    opened = []
    for chain in list(_chains(Steps(analysis, emitter))):
        end = emitter.shadow.origin[chain[-1]]
        ways = _ways(emitter, chain[-1])
        if tried.get(end, 0) >= len(ways):
            continue
        way = ways[tried.get(end, 0)]
        tried[end] = tried.get(end, 0) + 1
        try:
            opened.append(_open(emitter, chain, way))
        except Unable as why:
            log.debug("the last state `%s` gets no read-out: %s", end, why)
            tried[end] = len(ways)
    return opened


def close_last_states(
    graph: fx.Graph, opened: list[OpenState], attempts: list[tuple[fx.Node, str]]
) -> list[OpenState]:
    """Takes out what has been put in; returns those that were recognised. An attempt that ends with a read-out was one
    that ends with the loop."""
    found = []
    for each in opened:
        rows, state = each.last.args
        assert isinstance(rows, fx.Node)
        assert isinstance(state, fx.Node)
        if rows is not each.rows:
            found.append(each)
        each.last.replace_all_uses_with(state)
        graph.erase_node(each.last)
        _erase_unread(rows)
        attempts[:] = [(each.end if node is each.rows else node, why) for node, why in attempts]
    return found


def take_states_alone(graph: fx.Graph) -> int:
    """Operators of which the final state alone is read compute that alone from here on; returns how many."""
    taken = 0
    for call in graph.find_nodes(op="call_function", target=zeco.gated_linear_attention.default):
        if (
            call.kwargs
            or not call.users
            or any(user.target is not operator.getitem or user.args[1] != 1 for user in call.users)
        ):
            continue
        _, k, v, g, _, initial_state, _, *wiring = call.args
        with graph.inserting_before(call):
            state = graph.call_function(zeco.final_state_of.default, (k, v, g, initial_state, *wiring))
        for item in list(call.users):
            state.meta.update(item.meta)
            item.replace_all_uses_with(state)
            graph.erase_node(item)
        state.meta.update({key: mark for key, mark in call.meta.items() if key != "example_value"})
        graph.erase_node(call)
        taken += 1
    return taken


def _erase_unread(node: fx.Node) -> None:
    """The node and what it alone read, as far as passes have put it in."""
    stack = [node]
    while stack:
        node = stack.pop()
        target = node.target
        of_passes = getattr(target, "namespace", "") == "aten" and not target._schema.is_mutable  # type: ignore[union-attr]
        if not node.users and (of_passes or target in (operator.getitem, torch.stack)):
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            stack += sources


# ------------------------------------------------------------------------------------------------------- finding


def _chains(steps: Steps) -> Iterator[list[fx.Node]]:
    """States of all steps, of which the last one is read behind the loop."""
    within: set[fx.Node] = set()  # what a step computes of one state on the way to the next
    for node in reversed([node for node, step in steps.of.items() if step == steps.length - 1]):
        if node not in within and _may_be_state(steps, node):
            found = _chain(steps, node)
            if found is not None:
                chain, way = found
                within |= way
                yield chain


def _may_be_state(steps: Steps, node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and is_inexact(node) and steps.is_carried(node)


def _chain(steps: Steps, last: fx.Node) -> tuple[list[fx.Node], set[fx.Node]] | None:
    """The values of all steps, each computed from that of the step before, if the last one is read behind the loop; and
    what the last step computes on the way."""
    chain, within = [last], set[fx.Node]()
    for step in range(steps.length - 1, 0, -1):
        ends, way = steps.before(chain[-1])
        if len(ends) != 1:
            return None
        if step == steps.length - 1:
            within = following(ends) & way
            if not _is_read_behind(steps, last, ends[0], within):
                return None
        chain += ends
    return (chain[::-1], within) if all(map(steps.emitter.plain, chain)) else None


def _is_read_behind(steps: Steps, last: fx.Node, before: fx.Node, way: set[fx.Node]) -> bool:
    """Somebody reads the last state as nobody reads the one before it, but on the `way` to the last one."""
    others = [user for user in before.users if user not in way]
    return any(
        user not in others and not any(steps.same(user, each) for each in others) for user in last.users
    )


# ------------------------------------------------------------------------------------------------------ emitting


def _ways(emitter: Emitter, last: fx.Node) -> list[int | None]:
    """What may be read out of each state: the state itself, where it is no larger than a token, and its sums over one
    dimension, that of the keys."""
    value = last.meta["val"]
    sums: list[int | None] = [dim for dim in (-2, -1) if value.dim() >= -dim]
    small = value.numel() <= emitter.largest or value.dtype.is_complex
    return [None, *sums] if small else sums


def _open(emitter: Emitter, chain: list[fx.Node], way: int | None) -> OpenState:
    """Raises Unable."""
    order, shadow = emitter.order, emitter.shadow
    end = shadow.origin[chain[-1]]
    readers = []
    for user, read in emitter.reads.get(chain[-1], ()):
        if order[user] > order[end]:
            if read in emitter.mutable and emitter.written_after(read, end):
                raise Unable(f"`{read}` is written to later on")
            readers.append((user, read))
    if not readers:
        raise Unable("nobody reads it by that name")
    holders = []
    for state in chain:
        origin = shadow.origin[state]
        holder = emitter.holders(order[origin]).get(state)
        if holder is None:
            raise Unable(f"`{state}` has no name of its own")
        holders.append((origin, holder))
    read_out = []
    for origin, holder in holders:
        with emitter.graph.inserting_after(origin):
            if way is None:
                made = emitter.call(end, aten.clone.default, holder)
            else:
                made = emitter.call(end, aten.sum.dim_IntList, holder, [way])
            read_out.append(made)
    made_of_each = chain[-1].meta["val"].dim() - (way is not None)
    with emitter.graph.inserting_before(read_out[-1].next):
        rows = emitter.call(end, torch.stack, read_out, min(1, made_of_each))
        last = emitter.call(end, zeco.last_state.default, rows, holders[-1][1])
    last.meta[STANDS_FOR] = rows.meta[STANDS_FOR] = op_name(end)
    for user, read in readers:
        user.replace_input_with(read, last)
    return OpenState(end, last, rows)
