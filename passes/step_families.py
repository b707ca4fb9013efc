"""The values of a loop over the sequence that a step computes from its own token alone, the same in every step.

Most have no more elements than a token. What combines values of a token to more than it has is `wide`: the outer
product of k and v, which linear attention is there not to hold for all tokens, and which stays in the step. Two things
are wide and have to be held for all tokens, because no operator takes what they are made of instead:

- what is no linear function of something wide: Mamba's decays, `exp(dt[:, t, :, None] * A)`;
- what the state is multiplied with on its way to the next step: `1 + dt[:, t, :, None] * A`.

What else is wide becomes a family if these are computed from it, and is passed through only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.linearity import is_affine_op
from zeco_compile.passes.modes import AS_CALLED, changes_gradient, modes
from zeco_compile.passes.schema import WRITES, argument, is_random, operand, tensors
from zeco_compile.passes.sizes import at_hand

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.select.int,
        aten.slice.Tensor, aten.alias.default, aten.detach.default, aten.clone.default, operator.getitem,
        aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    }
)  # fmt: skip
"""What moves elements only: alone it is no reason to rewrite a loop."""

_SPREADING = (aten.expand.default, aten.repeat.default, aten.expand_copy.default)


@dataclass(eq=False)
class Family:
    """One value in every step: `steps[t]` are the ATen nodes that hold it in step t (more than one where the code
    computes it twice). `source` is what it is a row of, else `node` shows how it is computed from others."""

    node: fx.Node
    computes: bool
    own: int
    """Elements in one step, those that are only spread not counted."""
    steps: dict[int, list[fx.Node]] = field(default_factory=dict)
    source: fx.Node | None = None
    dim: int = 0
    keeps_dim: bool = False
    wide: bool = False
    bent: bool = False
    """It is wide, and is held for all tokens."""


def find_families(analysis: Analysis, first: int) -> Families:
    """The families of all steps from `first` on, or of all but the last."""
    search = _Search(analysis)
    for node in analysis.shadow.graph.nodes:
        if node.op == "call_function":
            search.add(node)
    return search.families(first)


@dataclass(frozen=True)
class Families:
    """`of`: nodes of the shadow -> the family whose step they are. `touched` is all that is computed from a row, in
    whatever way; `plain` says of a node whether it runs as the model was called."""

    of: dict[fx.Node, Family]
    touched: set[fx.Node]
    plain: Callable[[fx.Node], bool]


class _Search:
    """Goes through the shadow in order."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.plain = _plainly_run(analysis)
        self.known: dict[Any, Family] = {}
        self.of: dict[fx.Node, tuple[Family, int]] = {}
        self.constants: dict[Any, fx.Node] = {}
        self.touched: set[fx.Node] = set()

    def same(self, leaf: Any) -> Any:
        """What is the same in every step: a family for its values, one node for constants made alike."""
        if not isinstance(leaf, fx.Node):
            return repr(leaf)
        if leaf in self.of:
            return self.of[leaf][0]
        if is_factory(self.analysis, leaf):
            return self.constants.setdefault((leaf.target, repr(leaf.args), repr(leaf.kwargs)), leaf)
        return leaf

    def add(self, node: fx.Node) -> None:
        if not self.touched.isdisjoint(node.all_input_nodes):
            self.touched.add(node)
        taken = takes_row(self.analysis, node)
        if taken is not None:
            self.touched.add(node)
        if not self.plain(node):
            return
        if taken is not None:
            source, dim, keeps_dim, t = taken
            key: Any = ("row", source, dim, keeps_dim)
            made = Family(node, False, elements(node), source=source, dim=dim, keeps_dim=keeps_dim)
        else:
            within = [self.of[source] for source in node.all_input_nodes if source in self.of]
            steps = {t for _, t in within}
            others = {source for source in node.all_input_nodes if source not in self.of}
            if len(steps) != 1 or not others.isdisjoint(self.touched):
                return  # a value of one step that all of them use is another thing on a slice
            family = self._computed(node, [f for f, _ in within])
            if family is None:
                return
            made, (t,) = family, steps
            flat, spec = pytree.tree_flatten((node.args, node.kwargs))
            key = (node.target, repr(spec), tuple(self.same(leaf) for leaf in flat))
        self.touched.add(node)
        family = self.known.setdefault(key, made)
        family.steps.setdefault(t, []).append(node)
        self.of[node] = family, t

    def _computed(self, node: fx.Node, within: Sequence[Family]) -> Family | None:
        """The family of what an op computes from others, None where it must not be applied to all tokens at once."""
        given = [(f.node, f.own) for f in within]
        grown = False
        own = own_elements(node, given)
        if own is None:
            grown = may_be_batched(node) and elements(node) > max(map(elements, tensors(node)))
            if not grown:
                return None
            own = elements(node)
        computes = node.target not in VIEWS or any(f.computes for f in within)
        # Some columns of a token are no more than another value of it, but have axes of their own.
        computes = computes or elements(node) < max(elements(f.node) for f in within)
        wide = grown or any(f.wide for f in within)
        return Family(node, computes, own, wide=wide, bent=wide and self._is_bent(node, within, grown))

    def _is_bent(self, node: fx.Node, within: Sequence[Family], grown: bool) -> bool:
        sources = [n for n in node.all_input_nodes if n in self.of and (grown or self.of[n][0].wide)]
        if not all(is_affine_op(node, {source}) for source in sources):
            return True
        if grown:
            # by the sizes of what it is divided by, which is no linear function of that
            return node.target is aten.div.Tensor
        return len(within) == 1 and within[0].bent

    def families(self, first: int) -> Families:
        # Where a step reads the state before it writes, nobody reads what the last one would have written.
        needed = set(range(first, max(2, self.analysis.length - 1 + first)))
        complete = {n: f for n, (f, _) in self.of.items() if needed <= set(f.steps)}
        wanted = [f for f in dict.fromkeys(complete.values()) if f.bent or self._is_decay(f, complete)]
        held = {f for f in complete.values() if not f.wide} | set(wanted)
        while wanted:
            for source in wanted.pop().node.all_input_nodes:
                if source in complete and complete[source] not in held:
                    passed = complete[source]
                    passed.computes = False
                    held.add(passed)
                    wanted.append(passed)
        return Families({n: f for n, f in complete.items() if f in held}, self.touched, self.plain)

    def _is_decay(self, family: Family, complete: dict[fx.Node, Family]) -> bool:
        """The state is multiplied with it, and the next step finds the product."""
        if not family.wide or not family.computes or not {1, 2} <= set(family.steps):
            return False
        products = [
            user
            for node in family.steps[1]
            for user in node.users
            if user.target is aten.mul.Tensor and any(self._is_carried(n, complete) for n in tensors(user))
        ]
        seen = set(products)
        while products:
            for user in products.pop().users:
                if user in seen or not self._is_carried(user, complete) or user.target in _COLLECTING:
                    continue
                if any(self.of[n][1] == 2 for n in user.all_input_nodes if n in complete):
                    return True
                seen.add(user)
                products.append(user)
        return False

    def _is_carried(self, node: fx.Node, complete: dict[fx.Node, Family]) -> bool:
        return node in self.touched and node not in complete


_COLLECTING = (aten.stack.default, aten.cat.default, *WRITES)


def _plainly_run(analysis: Analysis) -> Callable[[fx.Node], bool]:
    """Whether an ATen node runs as the model was called: no other mode, and no backward of its own."""
    mode_of = modes(analysis.gm.graph)

    def plain(node: fx.Node) -> bool:
        origin = analysis.shadow.origin.get(node)
        if origin is None or changes_gradient(origin) or node.target is aten.detach.default:
            return False
        return mode_of[origin] == AS_CALLED

    return plain


def is_factory(analysis: Analysis, node: fx.Node) -> bool:
    """Made of numbers alone, and so the same wherever it is made again."""
    made = node.op == "call_function" and not node.all_input_nodes and not is_random(node)
    return made and analysis.is_constant(node)


def takes_row(analysis: Analysis, node: fx.Node) -> tuple[fx.Node, int, bool, int] | None:
    """(source, dimension, whether it is kept, t) of a node that reads row t along the whole sequence."""
    if node.target in (aten.select.int, aten.slice.Tensor):
        source = operand(node, 0)
        dim = argument(node, "dim", 0)
        start = argument(node, "index" if node.target is aten.select.int else "start")
        keeps_dim = node.target is aten.slice.Tensor
    elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        several = node.args[0]
        if several.target not in (aten.unbind.int, aten.split.Tensor):
            return None
        source = operand(several, 0)
        dim = argument(several, "dim", 0)
        start = node.args[1]
        keeps_dim = several.target is aten.split.Tensor
        if keeps_dim and argument(several, "split_size") != 1:
            return None
    else:
        return None
    shape = source.meta["val"].shape
    dim %= len(shape)
    start = 0 if start is None else start
    axes = analysis.track.axes
    along = analysis.track.sequence_dims(source)
    if along != [dim] or axes.flat(analysis.track.dims(source)[dim]) != axes.flat((axes.sequence,)):
        return None
    if not isinstance(start, int) or (keeps_dim and node.meta["val"].shape[dim] != 1):
        return None
    return source, dim, keeps_dim, start % analysis.length


def own_elements(node: fx.Node, operands: Sequence[tuple[fx.Node, int]]) -> int | None:
    """How many elements the op makes of the step's values, those that are only spread not counted; None if it must
    not be applied to all tokens at once. `operands` are the step's values, with the same of each.

    The outer product of k and v is computed from one token, too, but to hold it for all of them is what linear
    attention is there to avoid: an op that combines values may not make more of them than it is given.
    """
    target = node.target
    largest, made = max(own for _, own in operands), elements(node)
    if target is operator.getitem:
        return min(largest, made)
    if not isinstance(target, torch._ops.OpOverload) or not may_be_batched(node):
        return None
    if target in VIEWS or target in _SPREADING:
        return min(largest, made)
    combines = len(operands) > 1 or torch.Tag.pointwise in target.tags
    return None if combines and made > largest else made


def may_be_batched(node: fx.Node) -> bool:
    """The op does to a token what it does to it among others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.embedding.default and argument(node, "scale_grad_by_freq", False):
        return False  # each step counts its own tokens
    return not is_random(node) and not target._schema.is_mutable


def elements(node: fx.Node) -> int:
    """Of its values, for the inputs at hand: what is larger than what decides where a loop is cut, and nothing else."""
    return sum(
        at_hand(leaf.numel())
        for leaf in pytree.tree_leaves(node.meta["val"])
        if isinstance(leaf, torch.Tensor)
    )
