"""What a loop over the sequence does with its state that no supported family does, for the message of a refusal.

The supported families multiply the state by numbers. Whether a loop does more than that is read off its steps, values
that belong to one position each (`Tracking.stepwise`): from which positions each is computed, and which later ones are
computed from it.
"""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.plans import through_views
from zeco_compile.passes.schema import argument, tensors

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_LINEAR = (*_ADDITIONS, aten.mul.Tensor)


def peculiarity(analysis: Analysis, node: fx.Node) -> str | None:
    """A sentence on what a loop does that takes the row `node` out of the sequence; None where there is nothing to say.
    With complex numbers in it nothing else is said."""
    if node.target is aten.flip.default:
        return "The whole sequence can be turned around, each row a token; not a part of its rows, nor padded rows."
    steps = _steps(analysis, node)
    if any(each.meta["val"].dtype.is_complex for each in (*tensors(node), *steps)):
        return (
            "It computes with complex numbers, of which h = a * h + u is recognised, each element by itself, with a "
            "and u of the token or the same for all: no conjugate, absolute value or real part of the state in the "
            "update, no product with a matrix, no mask of the state, nothing that reads h before its update."
        )
    if _runs_from_the_end(analysis, steps):
        return (
            "The loop runs from the last token to the first. Where it is not recognised so, write it forward over "
            "`x.flip(1)`, and flip what comes of it."
        )
    if _reads_its_state(analysis, steps):
        return (
            "A step reads the state, in a product with values of its own, before it writes the state, as a delta rule "
            "does: such a transition is a matrix and no number, and no supported family has it."
        )
    if _mixes_two_states(analysis, steps):
        return (
            "Each of two states is computed from both. If they are the real and the imaginary part of one, as in "
            "`re, im = a * re - b * im + u, b * re + a * im + v`, write it in complex numbers: "
            "`h = torch.complex(a, b) * h + torch.complex(u, v)` is recognised."
        )
    return None


def _runs_from_the_end(analysis: Analysis, steps: list[fx.Node]) -> bool:
    """A row is added to what has been computed from all rows behind it, and those are several."""
    span = _positions(analysis)
    last = max((end for _, end in span.values()), default=0)
    for node in steps:
        own = [span[source] for source in tensors(node) if source in span]
        if node.target in _ADDITIONS and len(own) == 2:
            state, row = sorted(own, key=lambda each: each[0] == each[1])
            behind = state[0] - row[0] in (0, 1) and state[1] == last  # a gate of the row itself may be in it
            if row[0] == row[1] and behind and row[0] + 1 < last:
                return True
    return False


def _steps(analysis: Analysis, node: fx.Node) -> list[fx.Node]:
    """`node`, and what is computed from it up to where it is put beside other rows of the sequence; in order."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and analysis.track.stepwise(user):
                found.add(user)
                stack.append(user)
    return [
        n for n in analysis.shadow.graph.nodes if n in found and isinstance(n.meta.get("val"), torch.Tensor)
    ]


def _reads_its_state(analysis: Analysis, steps: list[fx.Node]) -> bool:
    """A later step is computed from products of the state and of values of one step, summed over features."""
    span = _positions(analysis)
    last: dict[fx.Node, int] = {}
    for node in reversed(analysis.shadow.graph.nodes):
        if node in span:
            last[node] = max([span[node][1], *(last[user] for user in node.users if user in last)])
    return any(
        node in span
        and last[node] > span[node][1]
        and any(_is_state_and_step(pair, span) for pair in _products(node))
        for node in steps
    )


def _mixes_two_states(analysis: Analysis, steps: list[fx.Node]) -> bool:
    """A step sums up multiples of two sums to which the step before has added rows of its own token."""
    span = _positions(analysis)

    def has_added(node: fx.Node, step: int) -> bool:
        own = (step, step)
        return node.target in _ADDITIONS and any(span.get(source) == own for source in tensors(node))

    for node in steps:
        if node.target not in _ADDITIONS or node not in span or not has_added(node, span[node][1]):
            continue
        before, found, stack = span[node][1] - 1, set[fx.Node](), list(tensors(node))
        while stack:
            source = stack.pop()
            if source not in span or span[source][1] != before:
                continue
            if has_added(source, before) and span[source][0] < before:
                found.add(source)
            elif source.target in _LINEAR:
                stack += tensors(source)
        if len(found) > 1:
            return True
    return False


def _positions(analysis: Analysis) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last position that each value of a single step, or of several, is computed from."""
    span: dict[fx.Node, tuple[int, int]] = {}
    for node in analysis.shadow.graph.nodes:
        if not analysis.track.stepwise(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if analysis.is_constant(node):
            continue  # as large as a row, and of none
        row = argument(node, "index") if node.target is aten.select.int else None
        if isinstance(row, int) and any(a.kind == "select" for a in analysis.track.acts_along_sequence(node)):
            span[node] = row, row
        elif sources := [span[source] for source in node.all_input_nodes if source in span]:
            span[node] = min(first for first, _ in sources), max(end for _, end in sources)
    return span


def _products(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The two values whose products a node sums up."""
    if node.target in _SUMS:
        node = through_views(tensors(node)[0])
        pairs = [tensors(node)] if node.target is aten.mul.Tensor else []
    else:
        pairs = [tensors(node)] if node.target in _PRODUCTS else []
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _is_state_and_step(pair: tuple[fx.Node, fx.Node], span: dict[fx.Node, tuple[int, int]]) -> bool:
    """One is computed from earlier positions, and the other from one position behind those alone."""
    if any(value not in span for value in pair):
        return False
    state, step = sorted((span[value] for value in pair), key=lambda each: each[0] == each[1])
    return step[0] == step[1] and state[0] < step[0] and (state[0] < state[1] or state[1] < step[0])
