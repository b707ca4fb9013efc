"""Writes the update of a loop's state as a decay and a write, where a mask says which steps change it.

Batches of unequal length are padded, and a padded step leaves the state alone: `torch.where(m, new, h)`, or
`m * new + (1 - m) * h`. The state enters in several places, and what decays it is no value of the code. But all of it
is linear in the state, so that the step is `a * h + b` with

    where(m, a * h + x, h)              a: where(m, a, 1)       b: where(m, x, 0)
    m * (a * h + x) + (1 - m) * h       a: m * a + (1 - m)      b: m * x

which follows op by op, whatever the spelling (`_Linear`). The decay is a function of the token alone, and is computed
for all of them at once; so is the write, unless it makes more of the token than that has (an outer product).

Only where the state goes several ways, one of them through a product of the step's own or a choice: `h + z * (c - h)`
and the like are known to `roles` by their gates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.schema import argument, operand, shape, tensors
from zeco_compile.passes.sizes import same_size

aten = torch.ops.aten

Expression = Any
"""A node of the shadow, a number, or (op, expression, ...)."""

Inside = Callable[[fx.Node], bool]
"""Whether a value is computed in the step that is looked at, by more than a function of its token."""


@dataclass(frozen=True)
class _Linear:
    """`factor * h + rest` of a value that is linear in the state h, element by element; None stands for zero.

    `ways` is how often the state enters, `factors` the most values of the step that one of the ways is multiplied
    with, `chosen` whether a mask chooses between ways.
    """

    factor: Expression
    rest: Expression
    ways: int = 0
    factors: int = 0
    chosen: bool = False

    @property
    def is_masked(self) -> bool:
        return self.chosen or (self.ways > 1 and self.factors > 1)


@dataclass(frozen=True)
class Update:
    """`after` = factor * before + rest, values of the shadow in one step."""

    before: fx.Node
    after: fx.Node
    factor: Expression
    rest: Expression


def find_updates(
    step_of: Mapping[fx.Node, int],
    is_carried: Callable[[fx.Node], bool],
    told: Callable[[fx.Node], str],
    length: int,
) -> Iterator[list[Update]]:
    """Chains of masked updates, one update for each step, all the same function of the state and their tokens.

    `step_of` has the latest step that a value is computed from, in the order of the graph; `is_carried` says whether it
    is more than a function of one step's token, and `told` what stands for a value in all steps.
    """
    at: dict[int, list[fx.Node]] = {}
    for node, step in step_of.items():
        if is_carried(node) and (node.target in _CHOICES or node.target in _SUMS):
            at.setdefault(step, []).append(node)
    taken: set[fx.Node] = set()
    for last in reversed(at.get(length - 1, [])):
        chain = None if last in taken else _chain(last, at, step_of, is_carried, told, length)
        if chain is not None:
            taken |= _between(chain[0].before, last, is_carried)
            yield chain[::-1]


def _chain(
    last: fx.Node,
    at: Mapping[int, list[fx.Node]],
    step_of: Mapping[fx.Node, int],
    is_carried: Callable[[fx.Node], bool],
    told: Callable[[fx.Node], str],
    length: int,
) -> list[Update] | None:
    """The updates from the last step to the first."""
    found: list[Update] = []
    after, form = last, ""
    for step in range(length - 1, -1, -1):
        states = frozenset(at.get(step - 1, []))

        def inside(node: fx.Node, step: int = step, states: frozenset[fx.Node] = states) -> bool:
            of = step_of.get(node)
            if of == step:
                return is_carried(node)
            # in `0.9 * h` there is nothing of this step
            scaled = node.target in _SCALED and of == (step - 1 if step else None)
            return scaled and (not step or is_carried(node)) and node not in states

        fitting = []
        for before in _reached(after, inside, also=lambda node: node not in step_of):
            of = step_of.get(before)
            left_behind = of is None if step == 0 else before in states
            linear = Reading(before, inside).of(after) if left_behind and _alike(before, after) else None
            if linear is None or not linear.is_masked:
                continue
            form_here = f"{shown(linear.factor, told)} * h + {shown(linear.rest, told)}"
            if form in ("", form_here):
                fitting.append((before, linear, form_here))
        if len(fitting) != 1:
            return None
        ((before, linear, form),) = fitting
        found.append(Update(before, after, linear.factor, linear.rest))
        after = before
    return found


def _reached(node: fx.Node, inside: Inside, also: Inside) -> list[fx.Node]:
    """What a value of a step is computed from, and the step has not computed, or `also` may have been there before."""
    found: dict[fx.Node, None] = {}
    stack, seen = [node], {node}
    while stack:
        for source in tensors(stack.pop()):
            if source not in seen:
                seen.add(source)
                within = inside(source)
                if within:
                    stack.append(source)
                if not within or also(source):
                    found[source] = None
    return list(found)


def _between(before: fx.Node, after: fx.Node, is_carried: Inside) -> set[fx.Node]:
    """What lies on the way from the state before a step to that after it: no rows of tokens, behind which there may be
    another loop."""
    found, stack = {after}, [after]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source is not before and source not in found and is_carried(source):
                found.add(source)
                stack.append(source)
    return found


def _alike(one: fx.Node, other: fx.Node) -> bool:
    sizes, others = shape(one), shape(other)
    same_type = one.meta["val"].dtype == other.meta["val"].dtype
    return same_type and len(sizes) == len(others) and all(map(same_size, sizes, others))


# ------------------------------------------------------------------------------------------------- linear in h


_MASKED_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CHOICES = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, *_MASKED_FILLS)
_SUMS = (
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.lerp.Tensor, aten.lerp.Scalar, aten.addcmul.default
)  # fmt: skip
_SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)
_COPIES = (aten.clone.default, aten.alias.default, aten.expand.default, aten.view.default)


class Reading:
    """Values of one step as functions of the state before it."""

    def __init__(self, before: fx.Node, inside: Inside) -> None:
        self.before, self.inside = before, inside
        self.known: dict[fx.Node, _Linear | None] = {}

    def of(self, node: Any) -> _Linear | None:
        """None if it is not linear in each element of the state."""
        if node is self.before:
            return _Linear(1, None, ways=1)
        if not isinstance(node, fx.Node) or not self.inside(node):
            return _Linear(None, node)
        if node not in self.known:
            operands = [self.of(each) for each in node.all_input_nodes]
            if all(each is not None and each.ways == 0 for each in operands):
                self.known[node] = _Linear(None, node)
            else:
                self.known[node] = None if None in operands else self._by_op(node)
        return self.known[node]

    def _by_op(self, node: fx.Node) -> _Linear | None:
        target = node.target

        def of(name: str) -> _Linear:
            linear = self.of(argument(node, name))
            assert linear is not None, "all operands are known to be linear"
            return linear

        if target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.rsub.Scalar):
            one, other, by = of("self"), of("other"), argument(node, "alpha", 1)
            if target in (aten.rsub.Tensor, aten.rsub.Scalar):
                one, other = other, one
            by = by if target is aten.add.Tensor or isinstance(by, fx.Node) else -by
            return None if isinstance(by, fx.Node) else _sum(one, _times(other, by))
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return _multiplied(of("self"), of("other"))
        if target in (aten.div.Tensor, aten.div.Scalar):
            return None if of("other").ways else _times(of("self"), of("other").rest, operator.truediv)
        if target is aten.neg.default:
            return _times(of("self"), -1)
        if target in (aten.lerp.Tensor, aten.lerp.Scalar):
            if of("weight").ways:
                return None
            weight = of("weight").rest
            rest = (operator.sub, 1, weight) if isinstance(weight, fx.Node) else 1 - weight
            return _sum(_times(of("self"), rest), _times(of("end"), weight))
        if target is aten.addcmul.default:
            product, by = _multiplied(of("tensor1"), of("tensor2")), argument(node, "value", 1)
            return None if product is None else _sum(of("self"), _times(product, by))
        if target in _CHOICES:
            fills = target in _MASKED_FILLS
            condition = of("mask" if fills else "condition")
            one, other = (of("value"), of("self")) if fills else (of("self"), of("other"))
            return None if condition.ways else _choice(condition.rest, one, other)
        if target in _COPIES and _alike(node, operand(node, 0)):
            return of("self")
        return None


def _sum(one: _Linear, other: _Linear) -> _Linear:
    return replace(
        _together(one, other),
        factor=_added(one.factor, other.factor),
        rest=_added(one.rest, other.rest),
    )


def _multiplied(one: _Linear, other: _Linear) -> _Linear | None:
    if one.ways and other.ways:
        return None
    return _times(other, one.rest) if other.ways else _times(one, other.rest)


def _times(linear: _Linear, by: Expression, op: Callable[..., Any] = operator.mul) -> _Linear:
    """Multiplied by what is no function of the state, or divided."""
    counted = linear.ways > 0 and isinstance(by, fx.Node | tuple)
    factor, rest = (_product(each, by, op) for each in (linear.factor, linear.rest))
    return replace(linear, factor=factor, rest=rest, factors=linear.factors + counted)


def _choice(condition: fx.Node, one: _Linear, other: _Linear) -> _Linear:
    if one.factor is None:  # a product with a mask: of the decay itself the logarithm can be taken
        factor = _product((torch.logical_not, condition), other.factor)
    elif other.factor is None:
        factor = _product(condition, one.factor)
    else:
        factor = (torch.where, condition, one.factor, other.factor)
    rest = None
    if one.rest is not None or other.rest is not None:
        rest = (torch.where, condition, *(0 if x.rest is None else x.rest for x in (one, other)))
    return replace(_together(one, other), factor=factor, rest=rest, chosen=True)


def _together(one: _Linear, other: _Linear) -> _Linear:
    ways, chosen = one.ways + other.ways, one.chosen or other.chosen
    return _Linear(None, None, ways, max(one.factors, other.factors), chosen)


def _added(one: Expression, other: Expression) -> Expression:
    if one is None or other is None:
        return other if one is None else one
    if not isinstance(one, fx.Node | tuple) and not isinstance(other, fx.Node | tuple):
        return one + other
    return (operator.add, one, other)


def _product(one: Expression, other: Expression, op: Callable[..., Any] = operator.mul) -> Expression:
    if one is None or other is None:
        return None
    if not isinstance(one, fx.Node | tuple) and not isinstance(other, fx.Node | tuple):
        return op(one, other)
    if not isinstance(other, fx.Node | tuple) and other == 1:
        return one
    if not isinstance(one, fx.Node | tuple) and one == 1 and op is operator.mul:
        return other
    return (op, one, other)


# ------------------------------------------------------------------------------------------------- expressions


def shown(expression: Expression, told: Callable[[fx.Node], str]) -> str:
    """The expression with what stands for each value in all steps."""
    if isinstance(expression, fx.Node):
        return told(expression)
    if isinstance(expression, tuple):
        op, *operands = expression
        return f"{op.__name__}({', '.join(shown(each, told) for each in operands)})"
    return repr(expression)


def leaves_of(expression: Expression) -> list[fx.Node]:
    """The values that an expression is computed from, each once."""
    found: dict[fx.Node, None] = {}
    stack = [expression]
    while stack:
        current = stack.pop()
        if isinstance(current, fx.Node):
            found[current] = None
        elif isinstance(current, tuple):
            stack += current[1:]
    return list(found)


def computed(expression: Expression, values: Mapping[fx.Node, torch.Tensor], dtype: torch.dtype) -> Any:
    """The expression from the values of its leaves; what a mask chooses among numbers has `dtype`."""
    if isinstance(expression, fx.Node):
        return values[expression]
    if not isinstance(expression, tuple):
        return expression
    op, *operands = expression
    given = [computed(each, values, dtype) for each in operands]
    if op is torch.where:
        condition, *both = given
        device = condition.device
        both = [
            x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype, device=device) for x in both
        ]
        return torch.where(condition, *both)
    return op(*given)
