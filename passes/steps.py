"""The values of a loop over the sequence, step by step: which step computes a value, and what it is in other steps.

What is found here says where to look. Whoever rewrites a graph by it has to compute what the graph did, whatever the
steps before have been.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.loops import Emitter
from zeco_compile.passes.schema import shape, tensors
from zeco_compile.passes.sizes import same_size
from zeco_compile.passes.step_families import is_factory


class Steps:
    """`of`: values of the shadow that depend on a row -> the latest step that they are computed from."""

    def __init__(self, analysis: Analysis, emitter: Emitter) -> None:
        self.analysis, self.emitter, self.length = analysis, emitter, analysis.length
        self.of: dict[fx.Node, int] = {}
        rows = {
            node: t
            for family in dict.fromkeys(emitter.found.values())
            for t, nodes in family.steps.items()
            for node in nodes
        }
        for node in analysis.shadow.graph.nodes:
            known = [self.of[source] for source in node.all_input_nodes if source in self.of]
            if analysis.is_constant(node):
                continue  # zeros like a row of the first token are of no step
            if node in rows or (known and node in emitter.touched):
                self.of[node] = rows.get(node, max(known, default=0))
        self.assumed: set[tuple[fx.Node, fx.Node]] = set()
        self._alike: dict[tuple[fx.Node, fx.Node], bool] = {}

    def is_carried(self, node: fx.Node) -> bool:
        """It is more than a function of one step's token."""
        return node in self.of and node not in self.emitter.found

    def before(self, node: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
        """The values of the step before that this one is computed from, and that are the same function as it is; and
        what has been gone through on the way to them. What is computed of a state alone (`0.9 * h`) is still of the
        step of that."""
        step, ends, seen, stack = self.of[node], dict[fx.Node, None](), {node}, [node]
        while stack:
            for source in tensors(stack.pop()):
                if source in seen or not self.is_carried(source) or self.of[source] < step - 1:
                    continue
                if self.of[source] == step - 1 and alike(source, node) and self.same(node, source):
                    ends[source] = None
                else:
                    seen.add(source)
                    stack.append(source)
        return list(ends), seen

    def assume(self, one: fx.Node, other: fx.Node) -> None:
        """Two values are states behind different steps, whatever they are computed from."""
        self.assumed.add((one, other))
        self._alike.clear()

    def same(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two values of different steps are the same function of their tokens, and of what they have found.

        What a step has found of the steps before is not compared.
        """
        key = one, other
        if key not in self._alike:
            self._alike[key] = True  # no value is computed from itself
            self._alike[key] = self._compare(one, other)
        return self._alike[key]

    def _compare(self, one: fx.Node, other: fx.Node) -> bool:
        if one.op != "call_function" or one.target is not other.target or not self.is_carried(one):
            return False
        if self.of[one] == self.of.get(other):
            return False
        own, spec = pytree.tree_flatten((one.args, one.kwargs))
        theirs, other_spec = pytree.tree_flatten((other.args, other.kwargs))
        if spec != other_spec:
            return False
        return all(self.same_operand(self.of[one], *pair) for pair in zip(own, theirs, strict=True))

    def same_operand(self, step: int, one: Any, other: Any) -> bool:
        """The same of what a value of `step` and one of another step are computed from."""
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return repr(one) == repr(other)
        earlier = self.is_carried(one) and self.of[one] < step
        if earlier or (one, other) in self.assumed:
            return True
        found = self.emitter.found
        if one in found or other in found:
            return found.get(one) is found.get(other)
        if one not in self.of:
            alike = is_factory(self.analysis, one) and repr((one.target, one.args, one.kwargs)) == repr(
                (other.target, other.args, other.kwargs)
            )
            return one is other or alike
        return self.same(one, other)


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Tensors of one shape and dtype."""
    if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in (one, other)):
        return False
    sizes, others = shape(one), shape(other)
    same_type = one.meta["val"].dtype == other.meta["val"].dtype
    return same_type and len(sizes) == len(others) and all(map(same_size, sizes, others))
