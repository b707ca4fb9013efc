"""Plans: what would make a node of the user's graph right, decided first and done later; and the tools to make one.

A rule (`sharding_rules`, `neighbours`, `losses`) looks at a node and returns a `Plan`; nothing is changed until it is
applied. What a plan puts into the graph is marked as settled: later analyses take it as intended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.checkpoints import inherit
from zeco_compile.passes.modes import reason_against
from zeco_compile.passes.schema import operand, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Ranks:
    """The group that shares the sequence, and this rank's place in it."""

    group: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Plan:
    """`apply(ranks)` rewrites the user's graph; `decision`, `detail` and `exchanges` go into the report.

    `exchanges` are (direction, bytes that a rank sends in the forward).
    """

    decision: str
    detail: str
    apply: Callable[[Ranks], None]
    exchanges: tuple[tuple[str, int], ...] = ()
    covers: tuple[fx.Node, ...] = ()
    """Other nodes of the user's graph that the plan replaces as well."""


class Emit:
    """Adds nodes to the user's graph at one place, with the source line of the node they stand for."""

    def __init__(self, user_node: fx.Node, *, after: bool) -> None:
        self.user_node, self.graph, self.after = user_node, user_node.graph, after
        self.last = user_node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        place = (
            self.graph.inserting_after(self.last)
            if self.after
            else self.graph.inserting_before(self.user_node)
        )
        with place:
            node = self.graph.call_function(target, args, kwargs)
        inherit(node, self.user_node)
        node.meta["zeco_settled"] = True
        if self.after:
            self.last = node
        return node


def settled(user_node: fx.Node) -> bool:
    """The node was rewritten, or made by a rewrite: what it does along the sequence is intended."""
    return bool(user_node.meta.get("zeco_settled"))


def settle(user_node: fx.Node) -> None:
    user_node.meta["zeco_settled"] = True


def call_arguments(user_node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return dict(zip(names, user_node.args, strict=False)) | dict(user_node.kwargs)


def mixing_nodes(analysis: Analysis, user_node: fx.Node) -> list[fx.Node]:
    return [n for n in analysis.shadow.groups.get(user_node, []) if analysis.mixes(n)]


def kinds(analysis: Analysis, node: fx.Node) -> set[str]:
    return {action.kind for action in analysis.own_mixing(node)}


def single_output(analysis: Analysis, user_node: fx.Node) -> fx.Node | None:
    made = analysis.shadow.value.get(user_node)
    return made if isinstance(made, fx.Node) else None


VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.clone.default,
    aten.expand.default, aten.t.default, aten._to_copy.default, aten.alias.default, aten.detach.default,
)  # fmt: skip


def bytes_of(analysis: Analysis, value: fx.Node, along: int | None = None, rows: int = 1) -> int:
    """Bytes of a value, or of some of its rows along the sequence, at the sizes of this call."""
    count, at_hand = value.meta["val"].dtype.itemsize, analysis.track.axes.facts.hints
    for i, size in enumerate(shape(value)):
        count *= rows if i == along else sympy.sympify(size).subs(at_hand)
    return int(count)


def halo_exchanges(
    analysis: Analysis, value: fx.Node, dim: int, left: int, right: int
) -> tuple[tuple[str, int], ...]:
    sent = (("to the next rank", left), ("to the previous rank", right))
    return tuple((way, bytes_of(analysis, value, dim, rows)) for way, rows in sent if rows > 0)


def through_views(node: fx.Node) -> fx.Node:
    """Where a value came from before views and copies."""
    while node.target in VIEWS:
        node = operand(node, 0)
    return node


def is_local(analysis: Analysis, node: fx.Node) -> bool:
    return analysis.state(node) is State.LOCAL


def row_dim(analysis: Analysis, node: fx.Node) -> int | None:
    """The dimension along the sequence, if it is one of rows alone (no other axis folded into it, no chunks)."""
    dims = analysis.track.sequence_dims(node)
    if len(dims) != 1 or analysis.track.axes.window_of(analysis.track.dims(node)[dims[0]]) is None:
        return None
    return dims[0]


def window_of(analysis: Analysis, node: fx.Node) -> tuple[Any, Any] | None:
    dim = row_dim(analysis, node)
    if dim is None:
        return None
    return analysis.track.axes.window_of(analysis.track.dims(node)[dim])


def replace_value(user_node: fx.Node, new: fx.Node, keep: Sequence[fx.Node]) -> None:
    """Readers of `user_node` read `new`, but for the nodes that compute it."""
    user_node.meta["zeco_replaced_by"] = new
    user_node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in keep and user is not new)


def substitute(user_node: fx.Node, new: fx.Node) -> None:
    """`new` instead of `user_node`, which goes."""
    user_node.meta["zeco_replaced_by"] = new
    user_node.replace_all_uses_with(new)
    user_node.graph.erase_node(user_node)


def current(user_node: fx.Node) -> fx.Node:
    """What stands for a node that an earlier plan has replaced."""
    while "zeco_replaced_by" in user_node.meta:
        user_node = user_node.meta["zeco_replaced_by"]
    return user_node


def path_to_base(
    analysis: Analysis, node: fx.Node, at: fx.Node
) -> tuple[fx.Node, list[fx.Node], tuple[Any, Any]] | None:
    """Back through views and slices of rows to a LOCAL value: (base, the views on the way, the window). None where
    what is on the way stops a gradient, or runs in another mode than the user's node `at`."""
    passed: list[fx.Node] = []
    path: list[fx.Node] = []
    window: tuple[Any, Any] | None = None
    while analysis.state(node) is State.WINDOW:
        if node.target is aten.slice.Tensor:
            if window is None:
                window = window_of(analysis, node)
        elif node.target in VIEWS:
            path.append(node)
        else:
            return None
        passed.append(node)
        node = operand(node, 0)
    if reason_against(analysis, passed, at) is not None:
        return None
    if window is None or analysis.state(node) is not State.LOCAL:
        return None
    return node, path[::-1], window


def holder_of(analysis: Analysis, value: fx.Node, at: fx.Node) -> fx.Node | None:
    """A node of the user's graph that has this value when `at` runs, and has not been written to since."""
    for user_node, made in analysis.shadow.value.items():
        if made is value and not analysis.shadow.is_written_to(user_node):
            return user_node
    order = {node: place for place, node in enumerate(analysis.gm.graph.nodes)}
    return analysis.shadow.holders(order, order[at]).get(value)
