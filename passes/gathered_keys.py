"""Attention that is not linear: each rank's queries against the keys and values of all ranks.

Contract: `over_all_keys(analysis, user_node)` gives the plan for a node where such attention ends: a call of
`F.scaled_dot_product_attention`, or the product with the values (a sum, a maximum over the keys) in code that computes
scores and takes their softmax, or another function of them that is not linear, itself. None for everything else.
`softmax_over_keys` is the same for softmax alone, which is no linear attention however it is spelled.

How such code is computed again, for the rows of this rank and the columns of all, is in rows_and_columns.py.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.pair_roles import Role, Roles, Unfit
from zeco_compile.passes.plans import Emit, Plan, Ranks, call_arguments, single_output, substitute
from zeco_compile.passes.rows_and_columns import MOVES, PairRegion
from zeco_compile.passes.schema import RESHAPES, tensors

log = logging.getLogger(__name__)

aten = torch.ops.aten


def over_all_keys(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The plan for a node that ends attention; None where it does not, or where it is not followed."""
    return softmax_over_keys(analysis, user_node) or _plan(analysis, user_node, _nonlinear_in_scores)


def softmax_over_keys(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The same, of softmax attention only."""
    return _plan(analysis, user_node, _has_softmax)


def _plan(analysis: Analysis, user_node: fx.Node, kind: Callable[[Analysis, fx.Node], bool]) -> Plan | None:
    try:
        if user_node.target is torch.nn.functional.scaled_dot_product_attention:
            return _sdpa(analysis, user_node)
        return _written_out(analysis, user_node, kind)
    except Unfit as why:
        log.debug("no attention ends at %s: %s", user_node, why)
        return None


# ---------------------------------------------------------------------------------------------------- the two ways


_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _sdpa(analysis: Analysis, user_node: fx.Node) -> Plan:
    given = call_arguments(user_node, _SDPA_NAMES)
    value_of = {n: analysis.shadow.reads.get((user_node, given[n])) for n in ("query", "key", "value")}
    query, key, value = (_is_value(value_of[n]) for n in ("query", "key", "value"))
    region = PairRegion(analysis, user_node)
    for name, node in (("query", query), ("key", key), ("value", value)):
        if analysis.track.sequence_dims(node) not in ([node.meta["val"].dim() - 2], []):
            raise Unfit(f"the {name} has the sequence in another dimension")
        if analysis.is_window(node):
            raise Unfit(f"the {name} has some rows of the sequence alone")
    if not analysis.track.sequence_dims(query):
        raise Unfit("the query does not run along the sequence")
    parts = [region.need(query, _roles(analysis, query, "row"))]
    parts += [region.need(node, _roles(analysis, node, "column")) for node in (key, value)]
    causal = bool(given.get("is_causal", False))
    if causal and not analysis.track.sequence_dims(key):
        raise Unfit("a causal mask against keys that are no positions")
    mask = given.get("attn_mask")
    if mask is not None:
        node = _is_value(analysis.shadow.reads.get((user_node, mask)))
        dims = analysis.track.sequence_dims(node)
        count = node.meta["val"].dim()
        roles: list[Role | None] = [None] * count
        for dim in dims:
            if dim < count - 2:
                raise Unfit("the mask has the sequence in another dimension")
            roles[dim] = "row" if dim == count - 2 else "column"
        parts.append(region.need(node, tuple(roles)))

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        values = region.emit(emit, ranks, parts)
        arguments = dict(zip(("query", "key", "value", "attn_mask"), values, strict=False))
        if causal:
            length = region.size(emit, analysis.length)
            rows = _numbers(emit, length, query, offset=emit.call(operator.mul, length, ranks.rank))
            columns = _numbers(emit, emit.call(operator.mul, length, ranks.world_size), query)
            seen = emit.call(torch.ge, emit.call(aten.unsqueeze.default, rows, 1), columns)
            arguments["attn_mask"] = seen
        rest = {k: v for k, v in call_arguments(user_node, _SDPA_NAMES).items() if k in _SDPA_NAMES[4:]}
        new = emit.call(user_node.target, **arguments, **{**rest, "is_causal": False})
        substitute(user_node, new)

    return region.plan(apply)


def _numbers(emit: Emit, count: Any, like: fx.Node, offset: Any = 0) -> fx.Node:
    made = emit.call(torch.arange, count, device=like.meta["val"].device)
    return made if isinstance(offset, int) and offset == 0 else emit.call(torch.add, made, offset)


def _written_out(
    analysis: Analysis, user_node: fx.Node, kind: Callable[[Analysis, fx.Node], bool]
) -> Plan | None:
    output = single_output(analysis, user_node)
    if output is None:
        return None
    if len(analysis.track.sequence_dims(output)) != 1 or analysis.is_window(output):
        return None
    if not kind(analysis, output):
        return None
    region = PairRegion(analysis, user_node, _following(analysis, _computed_from_pairs(analysis, output)))
    part = region.need(output, _roles(analysis, output, "row"))
    if not region.gathered:
        return None

    def apply(ranks: Ranks) -> None:
        (new,) = region.emit(Emit(user_node, after=False), ranks, [part])
        substitute(user_node, new)

    return region.plan(apply)


_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)


def _has_softmax(analysis: Analysis, output: fx.Node) -> bool:
    """There is one between the output and values that are local to a position."""
    return any(node.target in _SOFTMAX for node in _computed_from_pairs(analysis, output))


def _computed_from_pairs(analysis: Analysis, output: fx.Node) -> list[fx.Node]:
    """What is between the output and values that are local to a position, in order."""
    stack, seen = [output], {output}
    while stack:
        for source in stack.pop().all_input_nodes:
            if analysis.state(source) is State.MIXED and source not in seen:
                seen.add(source)
                stack.append(source)
    return [node for node in analysis.shadow.graph.nodes if node in seen]


def _following(analysis: Analysis, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them."""
    found = set(nodes)
    for node in analysis.shadow.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mul.Tensor)


def _nonlinear_in_scores(analysis: Analysis, output: fx.Node) -> bool:
    """Something that is not linear is done to products of two values of positions each, pair by pair."""
    scores = set[fx.Node]()
    for node in _computed_from_pairs(analysis, output):
        sources = tensors(node)
        if not scores.isdisjoint(sources):
            if any(analysis.is_pair(n) for n in sources if n in scores) and not _is_linear_in(node, scores):
                return True
            scores.add(node)
            continue
        of_positions = len(sources) > 1 and not any(map(analysis.is_constant, sources))
        if of_positions and node.target in _PRODUCTS and analysis.is_pair(node):
            scores.add(node)
    return False


def _is_linear_in(node: fx.Node, scores: Collection[fx.Node]) -> bool:
    """The op is linear in those of its operands, taken together."""
    of_scores = [
        place for place, value in enumerate(node.args) if isinstance(value, fx.Node) and value in scores
    ]
    if node.target in _PRODUCTS:
        return len(of_scores) == 1
    if node.target in (aten.div.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return of_scores == [0]
    if node.target is aten.where.self:
        return 0 not in of_scores
    return node.target in _LINEAR


def _is_value(node: Any) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise Unfit("an argument is no single value")
    return node


def _roles(analysis: Analysis, node: fx.Node, role: Role) -> Roles:
    along = analysis.track.sequence_dims(node)
    return tuple(role if d in along else None for d in range(node.meta["val"].dim()))


_LINEAR = (
    *RESHAPES, *MOVES, aten.expand.default, aten.clone.default, aten.detach.default, aten.alias.default,
    aten._to_copy.default, aten.slice.Tensor, aten.select.int, aten.cat.default, aten.constant_pad_nd.default,
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.tril.default,
    aten.triu.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
)  # fmt: skip
