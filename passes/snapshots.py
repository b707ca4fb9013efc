"""Values of inputs that the code reads, and then changes: a snapshot of each keeps them for the backward.

`y = (x - self.mean) * self.scale`, then `self.mean.lerp_(x.mean(), 0.1)`: the backward needs `x - self.mean`.
AOTAutograd may compute it again there, from the buffer as the forward has left it (torch 2.13, whatever the backend),
and the gradient of the scale is wrong. What an operator returns that AOTAutograd does not know is kept instead.
"""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.plans import Emit

zeco = torch.ops.zeco


def keep_read_values(analysis: Analysis) -> int:
    """Puts a snapshot before every read of an input's memory that is written to later; returns how many there are."""
    graph, shadow = analysis.gm.graph, analysis.shadow
    given = frozenset[int]().union(
        *(shadow.memory.get(node, frozenset()) for node in graph.nodes if node.op == "placeholder")
    )
    order = {node: place for place, node in enumerate(graph.nodes)}
    last_write: dict[int, int] = {}
    for writer, written in shadow.writes.items():
        for key in written & given:
            last_write[key] = max(last_write.get(key, -1), order.get(writer, -1))
    if not last_write:
        return 0
    made = 0
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node in shadow.writes:
            continue
        if not shadow.tensors_made(node):
            continue  # a size
        own = shadow.memory.get(node, frozenset())
        for source in node.all_input_nodes:
            memory = shadow.memory.get(source, frozenset())
            changes = any(last_write.get(key, -1) > order[node] for key in memory)
            if not changes or not own.isdisjoint(memory):
                continue  # nobody writes to it any more, or a view, whose readers are looked at
            if not isinstance(shadow.reads.get((node, source)), fx.Node):
                continue  # several tensors
            snapshot = Emit(node, after=False).call(zeco.snapshot.default, source)
            node.replace_input_with(source, snapshot)
            made += 1
    return made
