"""Who reads a value of the user's graph, once something else computes it: also those who read what has become of it.

A tensor that is written to in place keeps its name, and whoever reads it later reads another value. Where a node takes
the place of the tensor, the writes go into the node's result, and so have the later reads to. And what the code wrote
in place to compute the value is gone then, under every name of that memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from zeco_compile.passes.shadow import Shadow

Reader = tuple[fx.Node, fx.Node]
"""A node of the user's graph, and the argument of it that it reads."""


def readers_behind(
    shadow: Shadow, value: fx.Node, end: int, order: Mapping[fx.Node, int]
) -> tuple[list[Reader], bool] | None:
    """The reads, behind the node at position `end`, of an ATen node's value and of what writes in place make of it, and
    whether there are such writes.

    None where the memory that is written to has another name from before, under which it is read behind `end`: that
    name would show none of the writes.
    """
    behind = {reader: read for reader, read in shadow.reads.items() if order.get(reader[0], -1) > end}
    readers = [reader for reader, read in behind.items() if read is value]
    touched = {key for node, memory in shadow.writes.items() if order.get(node, -1) > end for key in memory}
    written = {argument for _, argument in readers if not touched.isdisjoint(shadow.memory.get(argument, ()))}
    if not written:
        return readers, False
    memory = {key for argument in written for key in shadow.memory[argument]}
    old = {node for node, own in shadow.memory.items() if order.get(node, end + 1) <= end and memory & own}
    if len(written) > 1 or not (old - written).isdisjoint(argument for _, argument in behind):
        return None
    return [reader for reader, read in behind.items() if read is value or reader[1] in written], True


def reader_of_erased_writes(
    shadow: Shadow,
    graph: fx.Graph,
    region: Collection[fx.Node],
    redirected: Sequence[Reader],
    kept: Sequence[fx.Node],
    order: Mapping[fx.Node, int],
) -> fx.Node | None:
    """A node that goes on reading memory into which nodes of `region` write that will be erased, once the reads
    `redirected` have gone to something else, which reads the nodes `kept`; None if there is none."""
    inside, elsewhere = set(region), set(redirected)
    stack = [
        node for node in graph.nodes if node.op == "output" or (node in shadow.writes and node not in inside)
    ]
    stack += kept
    alive = set(stack)
    while stack:
        node = stack.pop()
        for source in node.all_input_nodes:
            if source not in alive and (node, source) not in elsewhere:
                alive.add(source)
                stack.append(source)
    first: dict[int, int] = {}
    for node in inside - alive:
        for key in shadow.writes.get(node, ()):
            first[key] = min(first.get(key, order[node]), order[node])
    for node in kept:
        if any(key in first for key in shadow.memory.get(node, ())):
            return node
    fresh = _of_new_memory(shadow, graph, redirected)
    for reader in shadow.reads.keys() - elsewhere:
        user, argument = reader
        memory = frozenset() if argument in fresh else shadow.memory.get(argument, frozenset())
        if user in alive and any(first.get(key, order[user]) < order[user] for key in memory):
            return user
    return None


def _of_new_memory(shadow: Shadow, graph: fx.Graph, redirected: Sequence[Reader]) -> set[fx.Node]:
    """Views of what the reads `redirected` go to, and of nothing else that shares its memory."""
    elsewhere, fresh = set(redirected), set[fx.Node]()
    for node in graph.nodes:
        memory = shadow.memory.get(node, frozenset())
        viewed = [n for n in node.all_input_nodes if not memory.isdisjoint(shadow.memory.get(n, ()))]
        if viewed and all(n in fresh or (node, n) in elsewhere for n in viewed):
            fresh.add(node)
    return fresh
