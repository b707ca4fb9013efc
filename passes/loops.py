"""Moves out of a loop over the sequence what its steps compute from one token each.

People project inside of the step: `g = sigmoid(self.gate(x[:, t]))`, and after it: `outs.append(self.out(o))`.
Unrolled, that is one small graph for each token, and the recurrence lies in the middle. What a step computes from
its own token alone, for every token in the same way, is the same function applied to all tokens at once, and a row
of the result: `sigmoid(gate(x))[:, t]`. What it does to its output alone can be done once they are put together.
Both hold whatever is computed, so nothing has to be recognised first; what is left of the loop is the recurrence,
over whole tensors, and `recognize` takes it from there.

The functions are found in the shadow, where a value is a value and not a variable, and are batched by
`torch.vmap`. They go into the user's graph as ATen.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.checkpoints import inherit
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.masked_updates import Expression, Update, computed, find_updates, leaves_of, shown
from zeco_compile.passes.region import is_inexact
from zeco_compile.passes.report import STANDS_FOR, Decision, op_name
from zeco_compile.passes.schema import WRITES, argument, is_random, operand, operands
from zeco_compile.passes.step_families import (
    VIEWS,
    Families,
    Family,
    elements,
    find_families,
    is_factory,
    own_elements,
)

log = logging.getLogger(__name__)

aten = torch.ops.aten


class Unable(Exception):
    """A function cannot be moved; the loop stays as it is."""


def lift_steps(analysis: Analysis, decisions: list[Decision]) -> int:
    """Rewrites the graph of `analysis`; returns how many functions were moved."""
    emitter = emitter_for(analysis, decisions)
    if emitter is None:
        return 0
    moved = emitter.unmask() + emitter.lift() + emitter.sink()
    emitter.sweep()
    return moved


# ------------------------------------------------------------------------------------------------------- finding


def emitter_for(analysis: Analysis, decisions: list[Decision], first: int = 0) -> Emitter | None:
    """What writes the families of a loop over the sequence from step `first` on; None where no loop is to be seen, as
    with a length of one, or a symbolic one."""
    if not isinstance(analysis.length, int) or analysis.length < 2:
        return None
    found = find_families(analysis, first)
    return Emitter(analysis, found, decisions) if found.of else None


# ------------------------------------------------------------------------------------------------------ emitting


@dataclass(frozen=True)
class Place:
    """In front of `before`, where the values hold that there are right behind the user's node number `index`."""

    before: fx.Node
    index: int


@dataclass(frozen=True)
class Whole:
    """A value for all tokens, the sequence first: node(s) of the user's graph, and what they look like."""

    value: Any
    fake: Any


class Emitter:
    """Writes families into the user's graph."""

    def __init__(
        self,
        analysis: Analysis,
        found: Families,
        decisions: list[Decision],
    ) -> None:
        self.analysis, self.decisions = analysis, decisions
        self.found, self.touched, self.plain = found.of, found.touched, found.plain
        self.family_of = {n: f for n, f in self.found.items() if len(f.steps) == analysis.length}
        """The complete ones."""
        self.shadow, self.graph = analysis.shadow, analysis.gm.graph
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.mutable = {holder for holder in self.shadow.memory if self.shadow.is_written_to(holder)}
        self.reads: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for (user, read), value in self.shadow.reads.items():
            if isinstance(value, fx.Node):
                self.reads.setdefault(value, []).append((user, read))
        self.largest = max((elements(f.node) for f in self.family_of.values() if not f.wide), default=0)
        self.position = {node: i for i, node in enumerate(self.shadow.graph.nodes)}
        self.held: dict[int, dict[fx.Node, fx.Node]] = {}
        self.wholes: dict[Family, Any] = {}
        self.places: dict[Family, int] = {}
        self.made: list[fx.Node] = []
        self.unmasked: dict[fx.Node, fx.Node] = {}
        """States that have been written in another way -> the nodes that hold them now."""
        self.fake_mode = torch_private.fake_inputs(analysis.gm, analysis.example_inputs)[0]

    # -------------------------------------------------------------------------------------------- masked updates

    def unmask(self) -> int:
        """Writes updates of a state that a mask has a say in as a decay and a write (`masked_updates`)."""
        steps = {
            n: t for f in dict.fromkeys(self.family_of.values()) for t, ns in f.steps.items() for n in ns
        }
        step_of: dict[fx.Node, int] = {}
        for node in self.shadow.graph.nodes:
            known = [step_of[source] for source in node.all_input_nodes if source in step_of]
            if self.analysis.is_constant(node):
                continue  # zeros like a row of the first token are of no step
            if node in steps or (known and node in self.touched):
                step_of[node] = steps.get(node, max(known, default=0))

        def told(node: fx.Node) -> str:
            if node in self.family_of:
                return str(id(self.family_of[node]))
            if is_factory(self.analysis, node):
                return f"{node.target}({node.args}, {node.kwargs})"
            of_step = [source for source in node.all_input_nodes if source in step_of]
            if node not in step_of or any(step_of[source] != step_of[node] for source in of_step):
                return str(node)
            shown = fx.map_arg((node.args, node.kwargs), lambda n: _Told(told(n)))
            return f"{node.target}{shown}"

        def is_carried(node: fx.Node) -> bool:
            return node in self.touched and node not in self.family_of and self.plain(node)

        chains = list(find_updates(step_of, is_carried, told, self.analysis.length))
        written = 0
        for chain in chains:
            try:
                self._rewritten(chain, told)
            except Unable as why:
                log.debug("the update `%s` stays as it is: %s", chain[-1].after, why)
                continue
            written += 1
            self.report(chain[0].after, "written as a decay of the state, and what is added to it")
        return written

    def _rewritten(self, chain: Sequence[Update], told: Callable[[fx.Node], str]) -> None:
        """Raises Unable; what has been rewritten by then computes what it did."""
        first = self.shadow.origin[chain[0].after]
        known: dict[str, Whole] = {}
        for t, update in enumerate(chain):
            end = self.shadow.origin[update.after]
            readers = self.reads.get(update.after, ())
            if any(read in self.mutable for _, read in readers):
                raise Unable(f"`{update.after}` is written to")
            dtype = update.after.meta["val"].dtype
            before_all, at = Place(first, self.order[first] - 1), Place(end.next, self.order[end])
            step = _Step(self, t, end, dtype, told, before_all, at, known)
            leaves = [n for x in (update.factor, update.rest) for n in leaves_of(x)]
            floats = [n for n in leaves if is_inexact(n)]
            if any(n.meta["val"].dtype != dtype for n in floats):
                raise Unable("some of its values would be rounded before they meet the state")
            decay = step.row(update.factor)
            if decay is None or known[shown(update.factor, told)].fake.dtype != dtype:
                raise Unable("its decay is no value of the token")
            write = None if update.rest is None else step.value(update.rest)
            state = self.unmasked.get(update.before) or self.outer(update.before, at)
            new = step.call(aten.mul.Tensor, decay, state)
            new = new if write is None else step.call(aten.add.Tensor, new, write)
            new.meta[STANDS_FOR] = op_name(end)
            for user, read in readers:
                if self.order[user] > self.order[end]:
                    user.replace_input_with(read, new)
            self.unmasked[update.after] = new

    # ------------------------------------------------------------------------------------------ before the loop

    def lift(self) -> int:
        """Computes what the steps compute from their own tokens for all tokens, and gives each step its row."""
        moved = 0
        for family in dict.fromkeys(self.found.values()):
            # Who writes into what it reads needs a value of its own, and keeps it.
            readers = [
                (user, read, t)
                for t, nodes in family.steps.items()
                for node in nodes
                for user, read in self.reads.get(node, ())
                if read not in self.mutable
            ]
            spread = family.own < elements(family.node)  # the reader spreads a row as well
            if not family.computes or not readers or spread:
                continue
            try:
                whole = self.whole(family)
            except Unable as why:
                log.debug("`%s` stays in the loop: %s", family.node, why)
                continue
            for user, read, t in readers:
                with self.graph.inserting_before(user):
                    row = self.call(read, aten.select.int, whole.value, 0, t)
                row.meta[STANDS_FOR] = op_name(read)
                user.replace_input_with(read, row)
            moved += 1
            self.report(family.node, "computed for all tokens at once")
        return moved

    def whole(self, family: Family, by: Place | None = None) -> Whole:
        """The family for all tokens, the sequence first, computed before its first step, or `by` some place in front of
        that. Raises Unable."""
        if family not in self.wholes:
            users = [self.shadow.origin[n] for nodes in family.steps.values() for n in nodes]
            first = min(users, key=self.order.__getitem__)
            at = Place(first, self.order[first] - 1)
            if by is not None and by.index < at.index:
                at, first = by, by.before
            self.places[family] = at.index
            if family.source is not None:
                source, fake = self.outer(family.source, at), family.source.meta["val"]
                dim = family.dim
                order = [dim, *(d for d in range(fake.dim()) if d != dim)]
                with self.graph.inserting_before(first), self.fake_mode:
                    made, fake = self.call(first, aten.permute.default, source, order), fake.permute(order)
                    if (
                        not fake.is_contiguous()
                    ):  # or a projection of it becomes one small product for each token
                        made, fake = self.call(first, aten.contiguous.default, made), fake.contiguous()
                    if family.keeps_dim:
                        made = self.call(first, aten.unsqueeze.default, made, dim + 1)
                        fake = fake.unsqueeze(dim + 1)
                self.wholes[family] = Whole(made, fake)
            else:
                self.wholes[family] = self.batched(family.node, lambda leaf: self.leaf(leaf, at), at)
        if by is not None and self.places[family] > by.index:
            raise Unable(f"`{family.node}` is not known by then")
        return self.wholes[family]

    def leaf(self, leaf: fx.Node, at: Place) -> Whole | fx.Node:
        """An operand: of all tokens, or the one of all steps."""
        return self.whole(self.found[leaf], at) if leaf in self.found else self.outer(leaf, at)

    def holders(self, index: int) -> dict[fx.Node, fx.Node]:
        if index not in self.held:
            held = self.shadow.holders(self.order, index)
            self.held[index] = {value: self.unmasked.get(value, holder) for value, holder in held.items()}
        return self.held[index]

    def outer(self, node: fx.Node, at: Place) -> fx.Node:
        """A value that is the same in every step, as a node of the user's graph. Raises Unable."""
        holder = self.holders(at.index).get(node)
        if holder is not None:
            return holder
        if node.op != "call_function" or is_random(node):
            raise Unable(f"`{node}` has been overwritten by then")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.outer(n, at))
        with self.graph.inserting_before(at.before):
            return self.call(at.before, node.target, *args, **kwargs)

    def batched(self, node: fx.Node, operand_of: Callable[[fx.Node], Whole | fx.Node], at: Place) -> Whole:
        """The op of `node` for all tokens; its operands as `operand_of` gives them. Raises Unable."""
        given = {n: operand_of(n) for n in node.all_input_nodes}
        if node.target is operator.getitem:  # of an op with several results
            (several,) = given.values()
            assert isinstance(several, Whole), "an item of a family is of a family"
            index: Any = node.args[1]
            return Whole(several.value[index], several.fake[index])
        names = [n for n in given if isinstance(n.meta.get("val"), torch.Tensor)]

        def function(*values: torch.Tensor) -> Any:
            now = dict(zip(names, values, strict=True))
            known = {n: now[n] if n in now else n.meta["val"] for n in given}
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return self.for_all_tokens(function, {n: given[n] for n in names}, self.shadow.origin[node], at)

    def for_all_tokens(
        self, function: Callable[..., Any], given: dict[fx.Node, Whole | fx.Node], like: fx.Node, at: Place
    ) -> Whole:
        """A function of one token's values, of which those in all tokens, or the one of all steps, are `given`."""
        names = list(given)
        wholes = [each if isinstance(each, Whole) else None for each in map(given.__getitem__, names)]
        fakes = [n.meta["val"] if w is None else w.fake for n, w in zip(names, wholes, strict=True)]
        dims = tuple(None if w is None else 0 for w in wholes)
        with self.fake_mode, torch.no_grad():
            traced = make_fx(torch.vmap(function, in_dims=dims, out_dims=0))(*fakes)
        env: dict[fx.Node, Any] = {}
        waiting = iter(names)
        result, fake = None, None
        with self.graph.inserting_before(at.before):
            for each in traced.graph.nodes:
                if each.op == "placeholder":
                    operand_ = given[next(waiting)]
                    env[each] = operand_.value if isinstance(operand_, Whole) else operand_
                elif each.op == "call_function":
                    args, kwargs = fx.map_arg((each.args, each.kwargs), env.__getitem__)
                    # Strides are those of the trace; what the loop is replaced with may have others.
                    reshapes = each.target in (aten.view.default, aten._unsafe_view.default)
                    target = aten.reshape.default if reshapes else each.target
                    env[each] = self.call(like, target, *args, **kwargs)
                elif each.op == "output":
                    result = fx.map_arg(each.args[0], env.__getitem__)
                    fake = fx.map_arg(each.args[0], lambda n: n.meta["val"])
                else:
                    raise Unable(f"`{like}` needs a constant")
        return Whole(result, fake)

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        inherit(made, like)
        self.made.append(made)
        return made

    # ------------------------------------------------------------------------------------------- after the loop

    def sink(self) -> int:
        """Applies what the steps do to their outputs once, to all of them put together."""
        moved = 0
        for node in self.shadow.graph.nodes:
            collected = _collected(self.analysis, node)
            if collected is None or not self.plain(node):
                continue
            held = self.holders(self.order[self.shadow.origin[node]])
            cut = self._behind_readouts(collected.steps, held) or self._cut(self._cuts(collected.steps), held)
            if not any(link.target not in VIEWS for link in cut.links):
                continue
            try:
                self._put_together(node, collected, cut)
            except Unable as why:
                log.debug("`%s` stays in the loop: %s", cut.links[-1], why)
                continue
            moved += 1
            self.report(cut.links[-1], "computed once for the outputs of all steps")
        return moved

    def _cuts(self, steps: list[fx.Node]) -> list[_Cut]:
        """Backwards from what is put together: the places where all that a step still does depends on one value."""
        cuts = [_Cut([], [steps])]
        links: list[fx.Node] = []
        open_ = {
            steps[-1]: steps
        }  # values to be explained, by that of the last step: at first two may be one
        while True:
            last = max(open_, key=self.position.__getitem__)
            values = open_.pop(last)
            operands_ = None if self._carried(values) else self._operands(values)
            if operands_ is None:
                return cuts
            if any(open_.get(each[-1], each) != each for each in operands_):
                return cuts  # two that are one in the last step only
            links.append(last)
            open_.update({each[-1]: each for each in operands_})
            if len(open_) == 1:
                cuts.append(_Cut(list(links), list(open_.values())))

    def _behind_readouts(self, steps: list[fx.Node], held: dict[fx.Node, fx.Node]) -> _Cut | None:
        """A place behind several values that were read out of states, or are states that are no larger than a token: a
        numerator and its denominator."""
        links: list[fx.Node] = []
        open_, read_out = {steps[-1]: steps}, []
        while open_:
            values = open_.pop(max(open_, key=self.position.__getitem__))
            source = values[-1]
            while source.target in VIEWS and isinstance(source.args[0], fx.Node):
                source = source.args[0]
            carried = self._carried(values)
            whole = self._reads_out(source) or (carried and elements(values[0]) <= self.largest)
            if whole and all(each in held for each in values):
                read_out.append(values)
                continue
            operands_ = None if carried else self._operands(values)
            if operands_ is None or any(open_.get(each[-1], each) != each for each in operands_):
                return None
            links.append(values[-1])
            open_.update({each[-1]: each for each in operands_})
        if not 1 < len(read_out) <= _MOST_READOUTS:
            return None
        return _Cut(links, read_out, [[held[each] for each in values] for values in read_out])

    def _operands(self, now: list[fx.Node]) -> list[list[fx.Node]] | None:
        """The operands that the steps' own families do not explain, for all steps, if all compute `now` alike."""
        last = now[-1]
        if any(n.op != "call_function" or n.target is not last.target or n in self.family_of for n in now):
            return None
        flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in now]
        if any(spec != flat[0][1] for _, spec in flat) or not all(map(self.plain, now)):
            return None
        late: dict[Any, list[fx.Node]] = {}
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
            if all(isinstance(leaf, fx.Node) for leaf in leaves):
                values = list(leaves)
                if not self._explained(values) and late.setdefault(values[-1], values) != values:
                    return None
            elif any(repr(leaf) != repr(leaves[0]) for leaf in leaves):
                return None
        beside = [(n, self.family_of[n].own) for n in last.all_input_nodes if n in self.family_of]
        given = [(n, elements(n)) for n in late]
        if any(n in self.family_of for n in late):
            return None  # a value of another step
        if not late or own_elements(last, [*given, *beside]) is None:
            return None
        return list(late.values())

    def _explained(self, leaves: Sequence[Any]) -> bool:
        """One node in all steps that is of none of them, or the steps of one family in order."""
        if all(leaf is leaves[0] for leaf in leaves):
            return leaves[0] not in self.touched
        family = self.family_of.get(leaves[0])
        return family is not None and all(leaf in family.steps.get(t, ()) for t, leaf in enumerate(leaves))

    def _carried(self, values: list[fx.Node]) -> bool:
        """The value of one step is computed from that of the step before."""
        before, stack, seen = values[0], [values[1]], set()
        while stack:
            for source in stack.pop().all_input_nodes:
                if source is before:
                    return True
                later = self.position[source] > self.position[before]
                if later and source not in seen and source not in self.family_of:
                    seen.add(source)
                    stack.append(source)
        return False

    def _cut(self, cuts: list[_Cut], held: dict[fx.Node, fx.Node]) -> _Cut:
        """Where to cut, so that what is put together is what has been read out of the state, or the state itself
        where it is no larger than a token; and has a name of its own: behind what is one op to the user."""
        read = [i for i, cut in enumerate(cuts) if self._reads_out(cut.values[0][0])]
        small = [i for i, cut in enumerate(cuts) if elements(cut.values[0][0]) <= self.largest]
        (last,) = cuts[-1].values
        if last[0].meta["val"].dtype.is_complex and self._carried(last):
            read = [len(cuts) - 1]  # what gives complex states gives all of them (complex_recurrences.py)
        at = (read or small or [0])[-1]
        while at and any(each not in held for each in cuts[at].values[0]):
            at -= 1
        (values,) = cuts[at].values
        return _Cut(cuts[at].links, [values], [[held.get(each, each) for each in values]])

    def _reads_out(self, node: fx.Node) -> bool:
        """It contracts the state with a value of the step, a query: a product of matrices, or the sum over one."""
        if node.target in (aten.bmm.default, aten.mm.default, aten.mv.default, aten.dot.default):
            return any(n in self.family_of for n in node.all_input_nodes)
        if node.target not in (aten.sum.dim_IntList, aten.sum.default):
            return False
        before = operand(node, 0)
        while before.target in VIEWS:
            before = operand(before, 0)
        return before.target is aten.mul.Tensor and any(n in self.family_of for n in before.all_input_nodes)

    def _put_together(self, node: fx.Node, collected: _Collected, cut: _Cut) -> None:
        """Puts what is at `cut` together and does the rest to all of it, instead of `node`. Raises Unable."""
        end = self.shadow.origin[node]
        at = Place(end.next, self.order[end])
        readers = self._later_readers(node, end)
        known: dict[fx.Node, Whole] = {}
        with self.graph.inserting_before(at.before), self.fake_mode:
            for values, holders in zip(cut.values, cut.holders, strict=True):
                stacked = self.call(end, torch.stack, holders, 0)
                known[values[-1]] = Whole(stacked, torch.stack([each.meta["val"] for each in values], 0))
        for link in reversed(cut.links):
            known[link] = self.batched(link, lambda n: known[n] if n in known else self.leaf(n, at), at)
        made = known[collected.steps[-1]].value
        with self.graph.inserting_before(at.before):
            if collected.keeps_dim:
                made = self.call(end, aten.squeeze.dim, made, collected.dim + 1)
            order = list(range(1, node.meta["val"].dim()))
            order.insert(collected.dim, 0)
            made = self.call(end, aten.permute.default, made, order)
            made = self.call(end, aten.contiguous.default, made)  # as it was; the user may take a view
        for user, read in readers:
            user.replace_input_with(read, made)

    def _later_readers(self, node: fx.Node, end: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Who reads the collected outputs. Raises Unable where somebody writes into them later on."""
        readers = []
        for user, read in self.reads.get(node, ()):
            if self.order[user] <= self.order[end]:
                continue
            if read in self.mutable and self.written_after(read, end):
                raise Unable(f"`{read}` is written to later on")
            readers.append((user, read))
        if not readers:
            raise Unable("nobody reads them by that name")
        return readers

    def written_after(self, holder: fx.Node, end: fx.Node) -> bool:
        memory = self.shadow.memory[holder]
        return any(
            self.order[user] > self.order[end] and not memory.isdisjoint(written)
            for user, written in self.shadow.writes.items()
        )

    # ------------------------------------------------------------------------------------------------ afterwards

    def sweep(self) -> None:
        """Drops what nobody reads any more of the steps, and rows that were made for them."""
        groups = self.shadow.groups
        mine = {self.shadow.origin[n] for n in self.touched if n in self.shadow.origin} | set(self.made)
        for node in reversed(list(self.graph.nodes)):
            if node not in mine or node.users or any(s in self.mutable for s in node.all_input_nodes):
                continue
            if not any(map(is_random, groups.get(node, ()))):
                self.graph.erase_node(node)

    def report(self, node: fx.Node, what: str) -> None:
        user_node = self.shadow.origin[node]
        self.decisions.append(
            Decision(
                str(user_node), op_name(user_node), "moved out of the loop", user_location(user_node), what
            )
        )


# ----------------------------------------------------------------------------------------------- masked updates


class _Told(str):
    """Without quotes, among the arguments of an op."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Step:
    """Emits the expressions of step `t`. What is a function of the token alone is computed for all tokens, in front of
    the loop, and is `known` to all steps."""

    emitter: Emitter
    t: int
    end: fx.Node
    """The user's node that computes the state after the step."""
    dtype: torch.dtype
    told: Callable[[fx.Node], str]
    before_all: Place
    at: Place
    known: dict[str, Whole]

    def call(self, target: Any, *args: Any) -> fx.Node:
        with self.emitter.graph.inserting_before(self.at.before):
            return self.emitter.call(self.end, target, *args)

    def row(self, expression: Expression) -> fx.Node | None:
        """The row of the expression for all tokens; None if it is more than what a token has. Raises Unable."""
        emitter, key = self.emitter, shown(expression, self.told)
        if key not in self.known:
            values = leaves_of(expression)
            of_token = [emitter.family_of[n] for n in values if n in emitter.family_of]
            others = [n for n in values if n not in emitter.family_of]
            if not of_token or not emitter.touched.isdisjoint(others):
                return None

            def function(*given: torch.Tensor) -> Any:
                return computed(expression, dict(zip(values, given, strict=True)), self.dtype)

            sizes = torch.broadcast_shapes(*(n.meta["val"].shape for n in values))
            if math.prod(sizes) > max(emitter.largest, *(family.own for family in of_token)):
                return None
            given = {n: emitter.leaf(n, self.before_all) for n in values}
            like = self.before_all.before
            self.known[key] = emitter.for_all_tokens(function, given, like, self.before_all)
        return self.call(aten.select.int, self.known[key].value, 0, self.t)

    def value(self, expression: Expression) -> Any:
        """Raises Unable."""
        if not isinstance(expression, fx.Node | tuple):
            return expression
        if isinstance(expression, fx.Node):
            held = self.emitter.holders(self.at.index).get(expression)
            if held is not None:
                return held
        if (row := self.row(expression)) is not None:
            return row
        if isinstance(expression, fx.Node):
            raise Unable(f"`{expression}` has been overwritten by then")
        op, *operands = expression
        if op is torch.where:
            condition, one, other = operands
            kept = [] if _is_zero(one) else [self.masked(condition, one)]
            kept += [] if _is_zero(other) else [self.masked((torch.logical_not, condition), other)]
            return kept[0] if len(kept) == 1 else self.call(aten.add.Tensor, *kept)
        if op not in _AS_ATEN:
            raise Unable(f"`{op.__name__}` makes more of a token than it has")
        given = [self.value(each) for each in operands]
        if not isinstance(given[0], fx.Node):
            if op not in (operator.add, operator.mul):
                raise Unable(f"a number is what `{op.__name__}` begins with")
            given.reverse()
        return self.call(_AS_ATEN[op], *given)

    def masked(self, mask: Expression, expression: Expression) -> Any:
        """What is written where the mask says so, else zeros: a mask of the factors of a product, none of which would
        keep what is not a number in the other from the state. Raises Unable."""
        if (row := self.row((torch.where, mask, expression, 0))) is not None:
            return row
        op, operands = None, []
        if isinstance(expression, tuple):
            op, *operands = expression
            op = _AS_ATEN.get(op)
        elif isinstance(expression, fx.Node) and expression in self.emitter.touched:
            while expression.target in VIEWS and _same_shape(expression, operand(expression, 0)):
                expression = operand(expression, 0)
            op, operands = expression.target, list(expression.args)
        if op not in (aten.mul.Tensor, aten.bmm.default, aten.add.Tensor) or len(operands) != 2:
            raise Unable(f"a mask of what `{expression}` writes is none of its factors")
        return self.call(op, *(self.masked(mask, each) for each in operands))


_AS_ATEN: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
}


def _is_zero(expression: Expression) -> bool:
    return not isinstance(expression, fx.Node | tuple) and bool(expression == 0)


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    return bool(one.meta["val"].shape == other.meta["val"].shape)


# ------------------------------------------------------------------------------------------------------ outputs


@dataclass(frozen=True)
class _Cut:
    """`links` are the ops of the last step that lead from `values` to what is put together, nearest to it first; each
    of `values` are one value of all steps, in the user's graph `holders`."""

    links: list[fx.Node]
    values: list[list[fx.Node]]
    holders: list[list[fx.Node]] = field(default_factory=list)


_MOST_READOUTS = 4


@dataclass(frozen=True)
class _Collected:
    """The values of all steps, in order, along `dim` of one tensor; each has a dimension of one there if
    `keeps_dim`."""

    steps: list[fx.Node]
    dim: int
    keeps_dim: bool


def _collected(analysis: Analysis, node: fx.Node) -> _Collected | None:
    """What `node` puts together, if that is one value for each token."""
    length = analysis.length
    if node.target in (aten.stack.default, aten.cat.default):
        steps = operands(node)
        dim = argument(node, "dim", 0) % node.meta["val"].dim()
        keeps_dim = node.target is aten.cat.default
        if len(steps) != length or (keeps_dim and any(s.meta["val"].shape[dim] != 1 for s in steps)):
            return None
        return _Collected(steps, dim, keeps_dim)
    if node.target not in WRITES or any(
        user.target in WRITES and user.args[0] is node for user in node.users
    ):
        return None
    keeps_dim = node.target is aten.slice_scatter.default
    dim = argument(node, "dim", 0) % node.meta["val"].dim()
    written: dict[int, fx.Node] = {}
    current = node
    while current.target is node.target and argument(current, "dim", 0) % current.meta["val"].dim() == dim:
        start = argument(current, "start" if keeps_dim else "index")
        value = operand(current, 1)
        if not isinstance(start, int) or (keeps_dim and value.meta["val"].shape[dim] != 1):
            return None
        written.setdefault(start % length, value)
        current = operand(current, 0)
    whole = node.meta["val"]
    alike = all(v.meta["val"].dtype == whole.dtype for v in written.values())
    if len(written) != length or whole.shape[dim] != length or not alike:
        return None
    return _Collected([written[t] for t in range(length)], dim, keeps_dim)
