"""Loops that begin with the first token: `h = x[:, 0]`, and then a step for each of the others.

    h = x[:, 0]
    for t in range(1, T):
        h = 0.9 * h + 0.1 * x[:, t]

A rank that is not the first begins with a token that is no first token of the sequence. With a step for each token,
from a state of zeros, the loop is one like any other:

    w = torch.where(position == 0, x[:, :1], 0.1 * x)
    h = zeros
    for t in range(T):
        h = 0.9 * h + w[:, t]

whose decay at the first token does not matter. What the loop begins with, here `x[:, 0]`, is that of the sequence's
first token on every rank, as it is elsewhere. Where it is what a step would have written (k v^T), nothing is masked.

Contract: `begin_with_zeros(analysis, decisions)` rewrites the user's graph, which computes what it did, and returns how
many loops were found. Nothing is done unless all steps behind the first token are the same, and linear in the state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.loops import (
    Emitter,
    Place,
    Unable,
    Whole,
    emitter_for,
    log,
)
from zeco_compile.passes.masked_updates import Expression, Reading, Update, computed, leaves_of, shown
from zeco_compile.passes.region import is_inexact
from zeco_compile.passes.report import STANDS_FOR, Decision, op_name
from zeco_compile.passes.schema import WRITES, argument, following, operand, tensors
from zeco_compile.passes.step_families import Family, is_factory, takes_row
from zeco_compile.passes.steps import Steps, alike

aten = torch.ops.aten


def begin_with_zeros(analysis: Analysis, decisions: list[Decision]) -> int:
    """Rewrites the graph of `analysis`; returns how many loops were found."""
    emitter = emitter_for(analysis, decisions, first=1)
    if emitter is None:
        return 0
    steps = Steps(analysis, emitter)
    rewritten = 0
    chains = list(_loops(steps))
    for chain in chains:
        steps.assume(chain[0].after, chain[0].before)
    for chain in chains:
        try:
            _Beginning(emitter, steps, chain).rewrite()
        except Unable as why:
            log.debug("the loop `%s` begins as it does: %s", chain[-1].after, why)
            continue
        rewritten += 1
        emitter.report(chain[0].after, "a step for the first token as well, from a state of zeros")
    emitter.sweep()
    return rewritten


# ------------------------------------------------------------------------------------------------------- finding


def _loops(steps: Steps) -> Iterator[list[Update]]:
    """The updates of all steps but the first, the first of them with what was there behind the first token."""
    within: set[fx.Node] = set()
    of_last = [node for node, step in steps.of.items() if step == steps.length - 1]
    for node in reversed([n for n in of_last if isinstance(n.meta.get("val"), torch.Tensor)]):
        if (
            node in within
            or not steps.is_carried(node)
            or not steps.emitter.plain(node)
            or not is_inexact(node)
        ):
            continue
        chain = _loop(steps, node)
        if chain is not None:
            within |= following([chain[-1].before]) & _ancestors(node)
            yield chain


def _loop(steps: Steps, last: fx.Node) -> list[Update] | None:
    if last.meta["val"].dim() == 0:
        return None
    states = [last]
    for _ in range(steps.length - 2):
        ends = steps.before(states[-1])[0]
        if len(ends) != 1:
            return None
        states += ends
    first = [node for node in _found_of_first(steps, states[-1]) if alike(node, last)]
    first = [node for node in first if not steps.same(states[-1], node)]
    chains = [chain for node in first if (chain := _updates(steps, [*states[::-1]], node)) is not None]
    return chains[0] if len(chains) == 1 else None


def _found_of_first(steps: Steps, node: fx.Node) -> list[fx.Node]:
    """What the second step has found of the first token, and nothing of its own."""
    found, seen, stack = dict[fx.Node, None](), {node}, [node]
    while stack:
        for source in tensors(stack.pop()):
            if source in seen:
                continue
            seen.add(source)
            if steps.of.get(source) == 0:
                found[source] = None
            if source in steps.of:
                stack.append(source)
    return list(found)


def _updates(steps: Steps, states: list[fx.Node], first: fx.Node) -> list[Update] | None:
    """How each of the states follows from the one before, if in the same way in all steps."""
    chain: list[Update] = []
    for before, after in zip([first, *states[:-1]], states, strict=True):
        within = following([before]) & _ancestors(after)
        if before not in within:
            return None
        linear = Reading(before, within.__contains__).of(after)
        if linear is None or linear.ways == 0 or linear.rest is None:
            return None
        if any(_of_other_steps(steps, leaf, steps.of[after]) for leaf in leaves_of(linear.factor)):
            return None
        if any(_of_other_steps(steps, leaf, steps.of[after]) for leaf in leaves_of(linear.rest)):
            return None
        chain.append(Update(before, after, linear.factor, linear.rest))
    told = _told(steps)
    forms = {(shown(each.factor, told), shown(each.rest, told)) for each in chain}
    return chain if len(forms) == 1 else None


def _of_other_steps(steps: Steps, leaf: fx.Node, step: int) -> bool:
    """It is no function of the step's token alone, or of none."""
    seen, stack = {leaf}, [leaf]
    while stack:
        node = stack.pop()
        if node in steps.emitter.found:
            if steps.of[node] != step:
                return True
        elif node in steps.emitter.touched and not steps.analysis.is_constant(node):
            if steps.of.get(node) != step:
                return True
            stack += [source for source in tensors(node) if source not in seen]
            seen.update(stack)
    return False


def _told(steps: Steps) -> Callable[[fx.Node], str]:
    """What stands for a function of a step's token in all steps."""
    emitter = steps.emitter

    def told(node: fx.Node) -> str:
        if node in emitter.found:
            return f"family {id(emitter.found[node])}"
        if is_factory(steps.analysis, node):
            return f"{node.target}({node.args}, {node.kwargs})"
        if node not in steps.of:
            return str(node)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Text(told(n)))
        return f"{node.target}{arguments}"

    return told


class _Text(str):
    """Without quotes, among the arguments of an op."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


# ------------------------------------------------------------------------------------------------------ emitting

_SMOOTH = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.mul.Tensor, aten.mul.Scalar,
        aten.neg.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.silu.default, aten.gelu.default,
        aten.softplus.default, aten.log_sigmoid_forward.default, aten.exp.default, aten.embedding.default,
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.t.default,
        aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int,
        aten.slice.Tensor, aten.expand.default, aten.clone.default, aten.alias.default, aten._to_copy.default,
        aten.sum.dim_IntList, aten.mean.dim, operator.getitem, aten.split.Tensor, aten.split_with_sizes.default,
    }
)  # fmt: skip
"""Ops whose gradient is a number for all numbers."""


@dataclass(frozen=True)
class _Beginning:
    emitter: Emitter
    steps: Steps
    chain: list[Update]

    def rewrite(self) -> None:
        """Raises Unable."""
        emitter, order = self.emitter, self.emitter.order
        first, rest = self.chain[0].before, self.chain[0].rest
        readers = self._readers_of_first(first, self.chain[0].after)
        ends = [emitter.shadow.origin[each.after] for each in self.chain]
        before = min((user for user, _ in (*readers, (ends[0], first))), key=order.__getitem__)
        at, like = Place(before, order[before] - 1), ends[0]
        decay = self._of_all(self.chain[0].factor, at)
        as_written = isinstance(rest, fx.Node) and self.steps.same_operand(1, rest, first)
        written = None if as_written else self._masked(at)
        held = emitter.holders(at.index).get(first)
        if written is None and held is None:
            raise Unable(f"`{first}` has no name of its own by then")
        states: list[fx.Node] = []
        for t in range(1 if written is None else len(self.chain) + 1):
            place = at if t == 0 else Place(ends[t - 1].next, order[ends[t - 1]])
            with emitter.graph.inserting_before(place.before):
                row = held if written is None else emitter.call(like, aten.select.int, written, 0, t)
                state = states[-1] if states else emitter.call(like, aten.zeros_like.default, row)
                made = emitter.call(like, aten.add.Tensor, self._times(like, decay, state, t), row)
            made.meta[STANDS_FOR] = op_name(like)
            for user, read in (
                readers if t == 0 else self._later_readers(self.chain[t - 1].after, ends[t - 1])
            ):
                user.replace_input_with(read, made)
            states.append(made)

    def _times(self, like: fx.Node, decay: Expression, state: fx.Node, t: int) -> fx.Node:
        if isinstance(decay, Whole):
            decay = self.emitter.call(like, aten.select.int, decay.value, 0, t)
        return self.emitter.call(like, aten.mul.Tensor, state, decay)

    def _of_all(self, expression: Expression, at: Place) -> Expression:
        """A function of the token for all of them, or a number, or a node of the user's graph, in front of the loop."""
        leaves = leaves_of(expression)
        if not leaves:
            return expression
        found, dtype = self.emitter.found, self.chain[0].after.meta["val"].dtype
        if any(is_inexact(n) and n.meta["val"].dtype != dtype for n in leaves):
            raise Unable("some of its values would be rounded before they meet the state")
        if not any(n in found for n in leaves):
            if len(leaves) == 1 and expression is leaves[0] and expression not in self.emitter.touched:
                return self.emitter.outer(expression, at)
            raise Unable("it is no value of the token")
        if any(n in self.emitter.touched and n not in found for n in leaves):
            raise Unable("it is more than a token has")

        def function(*given: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = computed(expression, dict(zip(leaves, given, strict=True)), dtype)
            return made

        given = {n: self.emitter.leaf(n, at) for n in leaves}
        return self.emitter.for_all_tokens(function, given, at.before, at)

    def _masked(self, at: Place) -> fx.Node:
        """[T, ...]: what the steps write, and at the sequence's first position what the loop begins with.

        Both are computed for all tokens, also for those of which the code computes the other one. What that is must not
        matter, in the gradient neither.
        """
        emitter, first, value = self.emitter, self.chain[0].before, self.chain[0].after.meta["val"]
        if value.numel() > max(family.own for family in emitter.found.values()):
            raise Unable("what a step writes is more than a token has")
        for expression in (first, self.chain[0].factor, self.chain[0].rest):
            for leaf in leaves_of(expression):
                self._refuse_not_smooth(leaf)
        written, begun = self._of_all(self.chain[0].rest, at), self._everywhere(first, at)
        if not isinstance(written, Whole) or not isinstance(begun, Whole):
            raise Unable("what a step writes is nothing of its token")
        if written.fake.dtype != value.dtype or begun.fake.dtype != value.dtype:
            raise Unable("what a step writes is rounded before it meets the state")
        length = self.steps.length
        like = emitter.shadow.origin[self.chain[0].after]
        with emitter.graph.inserting_before(at.before):
            positions = emitter.call(like, torch.arange, length, device=value.device)
            mask = emitter.call(like, torch.eq, positions, 0)
            mask = emitter.call(like, aten.reshape.default, mask, [length, *(1 for _ in value.shape)])
            return emitter.call(like, torch.where, mask, begun.value, written.value)

    def _everywhere(self, node: fx.Node, at: Place) -> Whole | fx.Node:
        """What the code computes of the first token, for all of them. Raises Unable."""
        emitter, analysis = self.emitter, self.steps.analysis
        if node in emitter.found:
            return emitter.whole(emitter.found[node], at)
        if (taken := takes_row(analysis, node)) is not None:
            source, dim, keeps_dim, _ = taken
            return emitter.whole(Family(node, False, 0, {0: [node]}, source, dim, keeps_dim), at)
        if node not in self.steps.of:
            return emitter.outer(node, at)
        return emitter.batched(node, lambda n: self._everywhere(n, at), at)

    def _refuse_not_smooth(self, node: fx.Node) -> None:
        """Raises Unable where some op might have no gradient for a token that the code does not apply it to."""
        emitter = self.emitter
        if node not in emitter.touched or self.steps.analysis.is_constant(node):
            return
        family = emitter.found.get(node)
        if family is not None and len(family.steps) == self.steps.length:
            return  # the code applies it to all
        if takes_row(self.steps.analysis, node) is not None:
            return
        by_number = node.target is aten.div.Tensor and not isinstance(argument(node, "other"), fx.Node)
        if node.target not in _SMOOTH and not by_number:
            raise Unable(f"`{node}` may have no gradient for some token")
        for source in tensors(node):
            self._refuse_not_smooth(source)

    def _later_readers(self, state: fx.Node, end: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        return [
            (user, read)
            for user, read in self.emitter.reads.get(state, ())
            if self.emitter.order[user] > self.emitter.order[end]
        ]

    def _readers_of_first(self, first: fx.Node, second: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Who reads what the loop begins with as the state behind the first token: as others read those behind the
        tokens that follow."""
        emitter = self.emitter
        for state in (first, *(each.after for each in self.chain)):
            if any(read in emitter.mutable for _, read in emitter.reads.get(state, ())):
                raise Unable(f"`{state}` is written to")
        way = following([first]) & _ancestors(second)
        readers = []
        for user, read in emitter.reads.get(first, ()):
            of_user = [n for n in emitter.shadow.groups.get(user, ()) if n in first.users]
            as_later = any(self._reads_alike(n, other) for n in second.users for other in of_user)
            if as_later or not way.isdisjoint(of_user):
                readers.append((user, read))
        return readers

    def _reads_alike(self, node: fx.Node, other: fx.Node) -> bool:
        """The state behind the second token is read by `node` as `other` reads what the loop begins with."""
        if node is other:
            return True
        if node.target in WRITES:  # each into a row of its own
            written = operand(node, 1), operand(other, 1) if other.target is node.target else None
            return written == (self.chain[0].after, self.chain[0].before)
        return node in self.steps.of and self.steps.same_operand(self.steps.of[node], node, other)
