"""Rules for what is computed of all positions at once: softmax over the sequence, variances, norms, extremes, losses.

A call like `F.normalize(x, dim=1)` or `F.kl_div(a, b, reduction="batchmean")` is several ATen ops, of which one looks
at all positions. The call is replaced by its ATen ops, and each of those by what computes the same over all ranks
(over_all_ranks.py, rows_by_index.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.length import SIZES, VALUES, affine_constant
from zeco_compile.passes.modes import changes_gradient
from zeco_compile.passes.over_all_ranks import Over, Rule, rule_of
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    current,
    is_local,
    mixing_nodes,
    substitute,
)
from zeco_compile.passes.rows_by_index import rule_of_rows
from zeco_compile.passes.schema import is_random, operand, tensors

aten = torch.ops.aten
zeco = torch.ops.zeco


def composite(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """A call whose ATen ops look at other positions only by sums, extremes and the like over all of them."""
    replay = _Replay.of(analysis, user_node)
    if replay is None:
        return None
    mixing = mixing_nodes(analysis, user_node)
    names = ", ".join(dict.fromkeys(node.target.overloadpacket.__name__ for node in mixing))  # type: ignore[union-attr]
    if all(is_random(node) for node in mixing):
        return Plan("same on all ranks", f"{names} without a sequence: the first rank's", replay.apply)
    sent = sum(
        bytes_of(analysis, value)
        for node in mixing
        for value in (node, *node.users)
        if isinstance(value.meta.get("val"), torch.Tensor) and not analysis.track.sequence_dims(value)
    )
    return Plan("all-reduce", f"{names} over all ranks", replay.apply, (("among all ranks", sent),))


def _rule(analysis: Analysis, node: fx.Node) -> Rule | None:
    """What computes the same over all ranks."""
    return rule_of(analysis, node) or rule_of_rows(analysis, node)


@dataclass
class _Replay:
    """The ATen ops of a call, to be put in its place. `given` are the nodes of the user's graph that it reads, by the
    values that they have then."""

    analysis: Analysis
    user_node: fx.Node
    group: list[fx.Node]
    given: dict[fx.Node, fx.Node] = field(default_factory=dict)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    """Small tensors that the code has made of numbers, `[0, -1]`, by the nodes that read them."""

    @classmethod
    def of(cls, analysis: Analysis, user_node: fx.Node) -> _Replay | None:
        group = analysis.shadow.groups.get(user_node, [])
        mixing = mixing_nodes(analysis, user_node)
        if not mixing or user_node in analysis.shadow.writes or changes_gradient(user_node):
            return None
        replay = cls(analysis, user_node, group)
        for each in user_node.all_input_nodes:
            read = analysis.shadow.reads.get((user_node, each))
            if isinstance(read, fx.Node):
                replay.given[read] = each
        inputs = (
            [n for n in graph.nodes if n.op == "placeholder"]
            for graph in (analysis.shadow.graph, user_node.graph)
        )
        for value, placeholder in zip(*inputs, strict=True):
            if not isinstance(value.meta.get("val"), torch.Tensor):
                replay.given[value] = placeholder
        for source in [node for node in group if node.op == "get_attr"]:
            replay.group = [node for node in replay.group if node is not source]
            made = small_constant(source)
            if made is not None and not analysis.track.sequence_dims(source):
                replay.constants[source] = made
        possible = all(replay._is_possible(node, node in mixing) for node in replay.group)
        return replay if possible and replay._are_results_known() else None

    def _is_possible(self, node: fx.Node, mixes: bool) -> bool:
        analysis = self.analysis
        if node.op != "call_function" or getattr(node.target, "namespace", "") == "zeco":
            return False
        if any(analysis.is_window(n) or analysis.is_pair(n) for n in (node, *tensors(node))):
            return False
        if not all(is_local(analysis, n) or n in self.group for n in tensors(node)):
            return False
        if node.target is operator.getitem:
            return True
        if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            return self._has_number(node)
        if mixes:
            rule = _rule(analysis, node)
            drawn = (
                is_random(node)
                and not analysis.own_mixing(node)
                and isinstance(node.meta["val"], torch.Tensor)
            )
            if not drawn and (rule is None or not rule.applies(node)):
                return False
        return all(self._is_known(node, *each) for each in _given_arguments(node))

    def _is_known(self, node: fx.Node, name: str, value: Any) -> bool:
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, fx.Node):
                if not self._means_itself(name, leaf):
                    return False
            elif isinstance(leaf.meta.get("val"), torch.Tensor | list | tuple):
                if leaf not in self.given and leaf not in self.group and leaf not in self.constants:
                    return False
            elif not self._has_number(leaf):
                return False
            elif self._depends_on_length(leaf) and name not in SIZES:
                known = name in VALUES and _affine(leaf, self.analysis) is not None
                if not known:
                    return False
        return True

    def _means_itself(self, name: str, value: Any) -> bool:
        """A number that stands in the user's call, or that no length is; with a constant length any other may be it."""
        if not isinstance(self.analysis.length, int) or name not in VALUES or isinstance(value, bool):
            return True
        if not isinstance(value, int | float) or value in (0, 1, -1) or value != int(value):
            return True
        if name == "ignore_index" and value < 0:
            return True
        return value in pytree.tree_leaves((self.user_node.args, self.user_node.kwargs))

    def _has_number(self, node: fx.Node) -> bool:
        if node in self.given:
            return True
        if node.target is aten.sym_size.int:
            return operand(node, 0) in self.given or operand(node, 0) in self.group
        numbers = node.op == "call_function" and bool(node.all_input_nodes)
        return numbers and not tensors(node) and all(map(self._has_number, node.all_input_nodes))

    def _depends_on_length(self, node: fx.Node) -> bool:
        made, length = node.meta.get("val"), sympy.sympify(self.analysis.length)
        return isinstance(made, torch.SymInt | torch.SymFloat) and bool(
            made.node.expr.free_symbols & length.free_symbols
        )

    def _are_results_known(self) -> bool:
        made = self.analysis.shadow.value.get(self.user_node)
        inside = set(self.group)
        if isinstance(made, fx.Node):
            return made in inside
        if not isinstance(made, list | tuple):
            return False
        for user in self.user_node.users:
            place = user.args[1] if user.target is operator.getitem else None
            if not isinstance(place, int) or made[place] not in inside:
                return False
        return True

    # ------------------------------------------------------------------------------------------- into the graph

    def apply(self, ranks: Ranks) -> None:
        emit = Emit(self.user_node, after=False)
        over = Over(emit, ranks)
        env: dict[fx.Node, Any] = {value: current(node) for value, node in self.given.items()}
        mixing = set(mixing_nodes(self.analysis, self.user_node))
        device = next(
            value.meta["val"].device for value in self.group if isinstance(value.meta["val"], torch.Tensor)
        )
        for source, made in self.constants.items():
            env[source] = over.call(torch.tensor, made.tolist(), dtype=made.dtype, device=device)
        for node in self.group:
            if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
                continue  # a number, made where it is needed
            env[node] = self._replayed(over, node, env, node in mixing)
        made = self.analysis.shadow.value[self.user_node]
        if isinstance(made, fx.Node):
            substitute(self.user_node, env[made])
            return
        for user in list(self.user_node.users):
            place: Any = user.args[1]
            substitute(user, env[made[place]])
        self.user_node.graph.erase_node(self.user_node)

    def _replayed(self, over: Over, node: fx.Node, env: dict[fx.Node, Any], mixes: bool) -> Any:
        if node.target is operator.getitem:
            whole = env[operand(node, 0)]
            place: Any = node.args[1]
            return whole[place] if isinstance(whole, tuple) else over.call(operator.getitem, whole, place)
        if mixes and not is_random(node):
            rule = _rule(self.analysis, node)
            assert rule is not None, "what mixes has a rule, or the call is not replayed"
            return rule.emit(over, node, *(env[n] for n in tensors(node)))
        args, kwargs = [], {}
        for index, (name, value) in enumerate(_given_arguments(node)):
            new = pytree.tree_map(lambda leaf, name=name: self._leaf(over, name, leaf, env), value)
            if index < len(node.args):
                args.append(new)
            else:
                kwargs[name] = new
        made = over.call(node.target, *args, **kwargs)
        return over.call(zeco.from_rank.default, made, 0, over.ranks.group) if mixes else made

    def _leaf(self, over: Over, name: str, leaf: Any, env: dict[fx.Node, Any]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if isinstance(leaf.meta.get("val"), torch.Tensor | list | tuple):
            return env[leaf]
        number = self._number(over, leaf, env)
        if not self._depends_on_length(leaf) or name in SIZES:
            return number
        constant, ranks = _affine(leaf, self.analysis), over.ranks.world_size
        whole = over.call(operator.mul, number, ranks)  # of n + c that of the whole sequence is W n + c
        return over.call(operator.sub, whole, (ranks - 1) * constant) if constant else whole

    def _number(self, over: Over, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if node not in env:
            args: Any
            if node.target is aten.sym_size.int:
                args = env[operand(node, 0)], node.args[1]
            else:
                args = fx.map_arg(node.args, lambda each: self._number(over, each, env))
            env[node] = over.call(node.target, *args)
        return env[node]


def _given_arguments(node: fx.Node) -> list[tuple[str, Any]]:
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    return [*zip(names, node.args, strict=False), *node.kwargs.items()]


def _affine(node: fx.Node, analysis: Analysis) -> int | None:
    """c, if the number is a multiple of the length plus c."""
    return affine_constant(node.meta["val"], sympy.sympify(analysis.length).free_symbols)


def small_constant(node: fx.Node) -> torch.Tensor | None:
    """What is in a tensor that the code has made of a few numbers; None where it is not known."""
    made = getattr(node.graph.owning_module, str(node.target), None)
    content = getattr(made, "constant", made)
    return content if type(content) is torch.Tensor and content.numel() <= _FEW else None


_FEW = 16
