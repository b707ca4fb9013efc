"""Takes sums over the steps of a loop out of it: what the steps add up is put together, and summed once.

    for t in range(T):
        h = a[:, t] * h + b[:, t]
        loss = loss + f(h, y[:, t])

is a sum over the sequence like any other, if nothing but the next step reads it: `stack([f(h_t, y_t), ...]).sum()`.
With that, the loop has a value with a row for each position, which `loops` and `recognize` take from there.

Contract: `collect_sums(analysis, decisions)` rewrites the user's graph, which computes what it did, and returns how
many sums were found. Nothing is done unless every step adds the same functions of what it has found, and does it by an
addition to the sum itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.loops import Emitter, Place, Unable, emitter_for, log
from zeco_compile.passes.report import STANDS_FOR, Decision, op_name
from zeco_compile.passes.schema import argument
from zeco_compile.passes.steps import Steps, alike

aten = torch.ops.aten


@dataclass(frozen=True)
class _Sum:
    """`last` = start + the `terms` of all steps, each [first step, ..., last step]. Values of the shadow; `start` may
    be a number, or None."""

    last: fx.Node
    start: Any
    terms: list[list[fx.Node]]


def collect_sums(analysis: Analysis, decisions: list[Decision]) -> int:
    """Rewrites the graph of `analysis`; returns how many sums were found."""
    emitter = emitter_for(analysis, decisions)
    if emitter is None:
        return 0
    collected = 0
    for each in list(_sums(Steps(analysis, emitter))):
        try:
            _collect(emitter, each)
        except Unable as why:
            log.debug("the sum `%s` stays in the loop: %s", each.last, why)
            continue
        collected += 1
        emitter.report(each.last, "what all steps add, summed once")
    emitter.sweep()
    return collected


# ------------------------------------------------------------------------------------------------------- finding


def _sums(steps: Steps) -> Iterator[_Sum]:
    of_last = [node for node, step in steps.of.items() if step == steps.length - 1 and steps.is_carried(node)]
    for node in of_last:
        if (found := _sum(steps, node)) is not None:
            yield found


def _sum(steps: Steps, last: fx.Node) -> _Sum | None:
    """The sum that ends with this value, from the last step to the first."""
    if not isinstance(last.meta.get("val"), torch.Tensor):
        return None
    terms: list[list[fx.Node]] = []
    after: Any = last
    for step in range(steps.length - 1, -1, -1):
        added = _added(steps, after, step, terms[-1] if terms else None)
        if added is None:
            return None
        after, of_step = added
        terms.append(of_step)
    if isinstance(after, fx.Node) and (
        after in steps.of or not isinstance(after.meta.get("val"), torch.Tensor)
    ):
        return None
    return _Sum(last, after, [list(each)[::-1] for each in zip(*terms, strict=True)])


def _added(
    steps: Steps, after: Any, step: int, later: list[fx.Node] | None
) -> tuple[Any, list[fx.Node]] | None:
    """The sum before a step, and what the step adds to it, the same as the step behind it does (`later`, of the same
    order). None where it does something else."""
    terms: list[fx.Node] = []
    while isinstance(after, fx.Node):
        if later is not None and len(terms) == len(later):
            break
        if later is not None and step == 0 and _is_term(steps, after, later, terms):
            return None, [*terms, after]  # the sum begins with what the first step adds
        if not _is_addition(steps, after, step):
            break
        one, other = argument(after, "self"), argument(after, "other")
        ways = [
            (before, term)
            for before, term in ((one, other), (other, one))
            if _may_be_term(steps, after, term, step)
            and _may_be_before(steps, before, term, step)
            and (later is None or _is_term(steps, term, later, terms))
        ]
        if len(ways) != 1:
            return None
        ((after, term),) = ways
        terms.append(term)
    complete = bool(terms) and (later is None or len(terms) == len(later))
    return (after, terms) if complete else None


def _is_addition(steps: Steps, node: fx.Node, step: int) -> bool:
    plain = node.target is aten.add.Tensor and argument(node, "alpha", 1) == 1 and steps.emitter.plain(node)
    return plain and steps.of.get(node) == step and steps.is_carried(node)


def _may_be_term(steps: Steps, node: fx.Node, term: Any, step: int) -> bool:
    if not isinstance(term, fx.Node) or steps.of.get(term) != step:
        return False
    if not isinstance(term.meta["val"], torch.Tensor):
        return False
    return bool(term.meta["val"].dtype == node.meta["val"].dtype)


def _may_be_before(steps: Steps, before: Any, term: Any, step: int) -> bool:
    """The sum of the steps before, or one that has been added to in this step: only what adds to it reads it. Before
    the first step it is what the code has begun with, which may be what the first step adds."""
    if not isinstance(before, fx.Node):
        return step == 0
    if before not in steps.of:
        return step == 0
    if step == 1 and steps.of[before] == 0 and steps.same_operand(step, term, before):
        return True
    return before.target is aten.add.Tensor and len(before.users) == 1


def _is_term(steps: Steps, term: Any, later: list[fx.Node], known: list[fx.Node]) -> bool:
    """It is what the step behind has added at this place."""
    other = later[len(known)]
    if (
        not isinstance(term, fx.Node)
        or not isinstance(term.meta["val"], torch.Tensor)
        or not alike(term, other)
    ):
        return False
    return steps.same_operand(steps.of[other], other, term) and steps.of.get(term) != steps.of[other]


# ------------------------------------------------------------------------------------------------------ emitting


def _collect(emitter: Emitter, found: _Sum) -> None:
    """Raises Unable."""
    order, shadow = emitter.order, emitter.shadow
    end = shadow.origin[found.last]
    readers = []
    for user, read in emitter.reads.get(found.last, ()):
        if order[user] > order[end]:
            if read in emitter.mutable and emitter.written_after(read, end):
                raise Unable(f"`{read}` is written to later on")
            readers.append((user, read))
    if not readers:
        raise Unable("nobody reads it by that name")
    value = found.last.meta["val"]
    start, held, at = found.start, emitter.holders(order[end]), Place(end.next, order[end])
    if isinstance(start, fx.Node):
        if start.meta["val"].dtype != value.dtype:
            raise Unable("what it begins with has another dtype")
        start = emitter.outer(start, at)
    given = [
        x.meta["val"].shape for x in (found.start, *(x[0] for x in found.terms)) if isinstance(x, fx.Node)
    ]
    if torch.broadcast_shapes(*given) != value.shape:
        raise Unable("it is broadcast in some step")
    put_together = []
    for terms in found.terms:
        if terms[0].meta["val"].numel() > max(emitter.largest, 1):
            raise Unable("what a step adds is more than a token has")
        if (family := emitter.family_of.get(terms[0])) is not None:
            put_together.append(emitter.whole(family).value)
            continue
        if any(term not in held for term in terms):
            raise Unable("what a step adds has no name of its own")
        with emitter.graph.inserting_before(at.before):
            put_together.append(emitter.call(end, torch.stack, [held[term] for term in terms], 0))
    with emitter.graph.inserting_before(at.before):
        total = start
        for rows in put_together:
            summed = emitter.call(end, aten.sum.dim_IntList, rows, [0], dtype=value.dtype)
            nothing = total is None or (not isinstance(total, fx.Node) and total == 0)
            total = summed if nothing else emitter.call(end, aten.add.Tensor, summed, total)
            summed.meta[STANDS_FOR] = op_name(end)
    for user, read in readers:
        user.replace_input_with(read, total)
