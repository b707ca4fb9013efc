"""Takes running maxima out of a loop over the sequence: m = max(m + g, k), the stabiliser of exponential gates.

RWKV-4 and xLSTM keep their states as multiples of exp(-m), where m is the largest exponent so far, which decays as the
state does. Where g and k are functions of the step's own token, m is known for all tokens without the state:
`zeco::running_maximum` computes it, and what it was one step before. With both as rows, what is left of the loop is a
recurrence like any other, whose gates are functions of the token, and `loops` and `recognize` take it from there.

Contract: `lift_maxima(analysis, ranks, decisions)` rewrites the user's graph, which computes what it did, and returns
how many running maxima were found. Nothing is done unless every step updates m alike, from the m of the step before.
A maximum of something else, of another state's values or behind a minimum, a choice or a reset, stays where it is.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.loops import Emitter, Place, Unable, Whole, emitter_for
from zeco_compile.passes.masked_updates import Expression, Reading, computed, leaves_of, shown
from zeco_compile.passes.plans import Ranks, settle
from zeco_compile.passes.report import STANDS_FOR, Decision, op_name
from zeco_compile.passes.schema import is_random, operand

log = logging.getLogger(__name__)

aten = torch.ops.aten
zeco = torch.ops.zeco


@dataclass(frozen=True)
class _Update:
    """`after` = max(before + g, k) in one step; g is None where there is none. Values of the shadow."""

    before: fx.Node
    after: fx.Node
    g: Expression
    k: fx.Node


def lift_maxima(analysis: Analysis, ranks: Ranks, decisions: list[Decision]) -> int:
    """Rewrites the graph of `analysis`; returns how many maxima were found."""
    if not any(node.target is aten.maximum.default for node in analysis.shadow.graph.nodes):
        return 0
    emitter = emitter_for(analysis, decisions)
    if emitter is None:
        return 0
    steps = _Steps(analysis, emitter)
    lifted = 0
    for chain in list(steps.chains()):
        try:
            _Lifting(analysis, emitter, steps, chain, ranks).lift()
        except Unable as why:
            log.debug("the maximum `%s` stays in the loop: %s", chain[0].after, why)
            continue
        lifted += 1
        emitter.report(chain[0].after, "a running maximum, computed for all tokens at once")
    emitter.sweep()
    return lifted


# ------------------------------------------------------------------------------------------------------- finding


class _Steps:
    """Which step a value belongs to: the latest one whose token it is computed from."""

    def __init__(self, analysis: Analysis, emitter: Emitter) -> None:
        self.analysis, self.emitter = analysis, emitter
        self.of: dict[fx.Node, int] = {}
        for family in dict.fromkeys(emitter.found.values()):
            self.of.update({node: t for t, nodes in family.steps.items() for node in nodes})
        for node in analysis.shadow.graph.nodes:
            known = [self.of[source] for source in node.all_input_nodes if source in self.of]
            if node not in self.of and known and node in emitter.touched and not analysis.is_constant(node):
                self.of[node] = max(known)

    def told(self, node: fx.Node) -> str:
        """What stands for a value of a token, or of none, in all steps."""
        family = self.emitter.found.get(node)
        return str(node) if family is None else str(id(family))

    def of_no_step(self, node: fx.Node) -> bool:
        return node not in self.emitter.touched or self.analysis.is_constant(node)

    def chains(self) -> Iterator[list[_Update]]:
        """Updates of all steps, or of all but the last, whose m nobody may read; all alike."""
        length = self.analysis.length
        following: dict[fx.Node, list[_Update]] = {}
        for node in self.analysis.shadow.graph.nodes:
            for update in self._updates(node):
                following.setdefault(update.before, []).append(update)
        starts = [u for updates in following.values() for u in updates if self.of[u.after] == 0]
        for start in starts:
            if not self.of_no_step(start.before):
                continue
            chain = [start]
            while True:
                behind = [
                    u
                    for u in following.get(chain[-1].after, ())
                    if self.of[u.after] == len(chain) and self._form(u) == self._form(start)
                ]
                if len(behind) != 1:
                    break
                chain += behind
            if len(chain) >= max(2, length - 1):
                yield chain

    def _form(self, update: _Update) -> tuple[str, str]:
        return shown(update.g, self.told), self.told(update.k)

    def _updates(self, node: fx.Node) -> Iterator[_Update]:
        """The ways in which a value can be a running maximum."""
        step = self.of.get(node)
        if node.target is not aten.maximum.default or step is None or not self.emitter.plain(node):
            return
        if node.meta["val"].dtype not in (torch.float32, torch.float64):
            return  # halves would be rounded in another order
        if node in self.emitter.found:
            return

        for one, other in ((0, 1), (1, 0)):
            carried, k = operand(node, one), operand(node, other)
            if k not in self.emitter.found or self.of[k] != step or not _alike(k, node):
                continue
            for before in _sources(carried):
                if before in self.emitter.found or not _alike(before, node):
                    continue
                if step > 0 and before.target is not aten.maximum.default:
                    continue
                linear = Reading(before, partial(self._leads_to, before)).of(carried)
                if linear is None or linear.ways != 1 or linear.factor != 1:
                    continue
                if self._is_of_token(linear.rest, step, node) and self._all_plain(carried, before):
                    yield _Update(before, node, linear.rest, k)

    def _leads_to(self, before: fx.Node, node: fx.Node) -> bool:
        return node is not before and node not in self.emitter.found and before in _sources(node)

    def _is_of_token(self, g: Expression, step: int, node: fx.Node) -> bool:
        """All that g is computed from is of the step's own token, or of none, and as wide as m."""
        dtype = node.meta["val"].dtype
        return all(
            leaf.meta["val"].dtype == dtype
            and (self.of_no_step(leaf) or (leaf in self.emitter.found and self.of[leaf] == step))
            for leaf in leaves_of(g)
        )

    def _all_plain(self, node: fx.Node, before: fx.Node) -> bool:
        stack = [node]
        while stack:
            each = stack.pop()
            if each is before or each in self.emitter.found or self.of_no_step(each):
                continue
            if not self.emitter.plain(each):
                return False
            stack += each.all_input_nodes
        return True


def _sources(node: fx.Node) -> list[fx.Node]:
    """The value, and what it is the sum of, through sums and copies."""
    found, stack = dict.fromkeys([node]), [node]
    while stack:
        each = stack.pop()
        if each.target in _SUMS:
            for source in each.all_input_nodes:
                if source not in found:
                    found[source] = None
                    stack.append(source)
    return list(found)


_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.clone.default, aten.alias.default)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return False
    return torch.promote_types(a.dtype, b.dtype) == b.dtype  # what is narrower is exact in the wider one


# ------------------------------------------------------------------------------------------------------- writing


class _Lifting:
    """Puts one running maximum into the user's graph.

    Who reads m in a step gets a row of it. Who reads it in the next step, together with something of that step, gets
    the same number as a row of the m before. What is computed from m alone in between, as `m + w`, is of either step,
    and is computed for both.
    """

    def __init__(
        self, analysis: Analysis, emitter: Emitter, steps: _Steps, chain: list[_Update], ranks: Ranks
    ) -> None:
        self.analysis, self.emitter, self.steps, self.chain, self.ranks = (
            analysis,
            emitter,
            steps,
            chain,
            ranks,
        )
        self.shadow, self.graph = analysis.shadow, analysis.gm.graph
        self.m, self.before = {u.after: t for t, u in enumerate(chain)}, chain[0].before
        self.floating = self._floating()

    def lift(self) -> None:
        """Raises Unable before anything is changed but for values that nobody reads."""
        readers = self._readers()
        m, before = self._emit(self._place(readers))
        copies: dict[fx.Node, fx.Node] = {}

        def row(whole: fx.Node, t: int, user: fx.Node, read: fx.Node) -> fx.Node:
            with self.graph.inserting_before(user):
                made = self.emitter.call(
                    read if read.op != "placeholder" else user, aten.select.int, whole, 0, t
                )
            made.meta[STANDS_FOR] = op_name(read)
            return made

        def in_next_step(user_node: fx.Node) -> fx.Node:
            """A call that makes a floating value, once more from the m before."""
            if user_node not in copies:
                with self.graph.inserting_after(user_node):
                    copy = self.graph.node_copy(user_node, lambda n: n)
                self.emitter.made.append(copy)
                for read in user_node.all_input_nodes:
                    if (new := self._as_before(user_node, read, copy, row, before, in_next_step)) is not None:
                        copy.replace_input_with(read, new)
                copies[user_node] = copy
            return copies[user_node]

        # Copies are made of calls that still read what they did.
        for user, read in readers.following:
            new = self._as_before(user, read, user, row, before, in_next_step)
            assert new is not None, "it reads m, or what is computed from it"
            user.replace_input_with(read, new)
        for user, read in readers.first:
            user.replace_input_with(read, row(before, 0, user, read))
        for user, read, t in readers.current:
            user.replace_input_with(read, row(m, t, user, read))

    def _as_before(
        self, user: fx.Node, read: fx.Node, at: fx.Node, row: Any, before: fx.Node, in_next_step: Any
    ) -> fx.Node | None:
        """What stands for the argument `read` of `user` in the step behind that of its m."""
        value = self.shadow.reads.get((user, read))
        if not isinstance(value, fx.Node):
            return None
        if value in self.m:
            made: fx.Node = row(before, self.m[value] + 1, at, read)
            return made
        if value in self.floating:
            copy: fx.Node = in_next_step(self._maker(value))
            return copy
        return None

    # --------------------------------------------------------------------------------------------------- readers

    def _floating(self) -> dict[fx.Node, int]:
        """Values that are computed from the m of one step and from what is of no step -> that step."""
        floating: dict[fx.Node, int] = {}
        for node in self.shadow.graph.nodes:
            if node in self.m or node.op != "call_function" or node in self.emitter.found:
                continue
            of = {
                floating.get(s, self.m.get(s)) for s in node.all_input_nodes if s in floating or s in self.m
            }
            others = [s for s in node.all_input_nodes if s not in floating and s not in self.m]
            if len(of) == 1 and all(map(self.steps.of_no_step, others)):
                (step,) = of
                assert step is not None
                floating[node] = step
        return floating

    def _maker(self, value: fx.Node) -> fx.Node:
        """The call that makes a floating value. Raises Unable."""
        user_node = self.shadow.origin[value]
        group = self.shadow.groups.get(user_node, [])
        if self.shadow.value.get(user_node) is not value or any(n not in self.floating for n in group):
            raise Unable(f"`{value}` is a part of what `{user_node}` makes")
        if any(map(is_random, group)):
            raise Unable(f"`{user_node}` draws numbers, and would draw others a second time")
        if user_node in self.shadow.writes or user_node in self.emitter.mutable:
            raise Unable(f"`{user_node}` is written to")
        if any(s in self.emitter.mutable for s in user_node.all_input_nodes):
            raise Unable(f"what `{user_node}` reads is written to")
        return user_node

    def _is_of_step(self, user: fx.Node) -> int | None:
        """The latest step whose values a call reads; None if it puts values of several steps together."""
        if user.op == "output" or any(isinstance(each, list | tuple) for each in user.args):
            return None
        read = [v for each in user.all_input_nodes for v in self.shadow.tensors_read(user, each)]
        return max((self.steps.of[v] for v in read if v in self.steps.of), default=None)

    def _readers(self) -> _Readers:
        """Raises Unable."""
        current: list[tuple[fx.Node, fx.Node, int]] = []
        following: list[tuple[fx.Node, fx.Node]] = []
        second: list[tuple[fx.Node, fx.Node]] = []
        for value, t in (*self.m.items(), *self.floating.items()):
            for user, read in self.emitter.reads.get(value, ()):
                if user.op != "output" and not self.shadow.groups.get(user):
                    continue  # another name for it
                if read in self.emitter.mutable:
                    raise Unable(f"`{read}` is written to")
                if self._is_of_step(user) == t + 1:
                    following.append((user, read))
                    second += [(user, read)] if t == 0 else []
                    self._beginnings([(user, read)])  # raises what there is to be raised
                elif value in self.m:
                    current.append((user, read, t))
        # The value in front of the first step may be where other states begin, too.
        beginnings = self._beginnings(second)
        first, of_first = [], Counter[str]()
        for user, read in self.emitter.reads.get(self.before, ()):
            ways = self._ways(user, self.before)
            if not ways or not set(ways) <= set(beginnings):
                continue
            if read in self.emitter.mutable:
                raise Unable(f"`{read}` is written to")
            first.append((user, read))
            of_first += ways
        if of_first != beginnings:
            raise Unable("what the first step computes from it is not what the second one does")
        return _Readers(first, current, following)

    def _beginnings(self, readers: list[tuple[fx.Node, fx.Node]]) -> Counter[str]:
        """What is computed from m itself, by these calls or what makes the floating values that they read. Raises
        Unable."""
        out: Counter[str] = Counter()
        seen: set[tuple[fx.Node, fx.Node]] = set()
        stack = list(readers)
        while stack:
            user, read = stack.pop()
            value = self.shadow.reads.get((user, read))
            if (user, read) in seen or not isinstance(value, fx.Node):
                continue
            seen.add((user, read))
            if value in self.floating:
                maker = self._maker(value)
                stack += [(maker, each) for each in maker.all_input_nodes]
            elif value in self.m:
                out += self._ways(user, value)
        return out

    def _ways(self, user: fx.Node, value: fx.Node) -> Counter[str]:
        """What the call computes from the value directly."""

        def leaf(each: fx.Node) -> str:
            if each is value:
                return "m"
            token = each in self.emitter.found or self.steps.of_no_step(each)
            return self.steps.told(each) if token else "..."

        out: Counter[str] = Counter()
        for node in self.shadow.groups.get(user, ()):
            if value in node.all_input_nodes:
                args, kwargs = pytree.tree_map(
                    lambda x: leaf(x) if isinstance(x, fx.Node) else x, (node.args, node.kwargs)
                )
                out[f"{node.target}{args}{kwargs}"] += 1
        return out

    # ------------------------------------------------------------------------------------------------- the operator

    def _place(self, readers: _Readers) -> Place:
        order = self.emitter.order
        everyone = (*readers.first, *readers.following, *((user, read) for user, read, _ in readers.current))
        users = [user for user, _ in everyone]
        first = min(users, key=order.__getitem__)
        return Place(first, order[first] - 1)

    def _emit(self, at: Place) -> tuple[fx.Node, fx.Node]:
        """Raises Unable."""
        emitter, update = self.emitter, self.chain[0]
        end, value = self.shadow.origin[update.after], update.after.meta["val"]
        leaves = list(dict.fromkeys([update.k, *leaves_of(update.g)]))
        given: dict[fx.Node, Whole | fx.Node] = {leaf: emitter.leaf(leaf, at) for leaf in leaves}

        def function(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            known = dict(zip(leaves, values, strict=True))
            nothing = torch.zeros_like(known[update.k], dtype=value.dtype)
            g = nothing if update.g is None else computed(update.g, known, value.dtype) + nothing
            return g, known[update.k].to(value.dtype, copy=True)

        both = emitter.for_all_tokens(function, given, end, at)
        initial = emitter.outer(self.before, at)
        with self.graph.inserting_before(at.before):
            g, k = both.value
            if self.before.meta["val"].dtype != value.dtype:
                initial = emitter.call(end, aten.to.dtype, initial, value.dtype)
            made = emitter.call(
                end, zeco.running_maximum.default, g, k, initial, self.ranks.group, self.ranks.world_size
            )
            settle(made)
            m, before = (emitter.call(end, operator.getitem, made, place) for place in (0, 1))
        return m, before


@dataclass(frozen=True)
class _Readers:
    """(call, argument, step of m) of those that read m in its own step, and in the step that follows; and (call,
    argument) of those that read what it is in front of the first step."""

    first: list[tuple[fx.Node, fx.Node]]
    current: list[tuple[fx.Node, fx.Node, int]]
    following: list[tuple[fx.Node, fx.Node]]
