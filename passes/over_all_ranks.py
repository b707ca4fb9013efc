"""Ops that look at all positions, over all ranks: sums, extremes, norms, variances, softmax, losses.

`rule_of(analysis, node)` gives what computes an ATen op so, where its dimensions have the whole sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.plans import Emit, Ranks, call_arguments, kinds
from zeco_compile.passes.schema import argument, operand, tensors

aten = torch.ops.aten
zeco = torch.ops.zeco


@dataclass
class Over:
    """Sums, numbers and extremes over dimensions of which one has the sequence, over all ranks."""

    emit: Emit
    ranks: Ranks

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit.call(target, *args, **kwargs)

    def everywhere(self, x: fx.Node) -> fx.Node:
        return self.call(zeco.all_sum.default, x, self.ranks.group)

    def wide(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x`, which has `dtype`, for sums: those of halves are made in float32."""
        return self.call(aten.to.dtype, x, torch.float32) if dtype in _HALVES else x

    def sum(self, x: fx.Node, dims: Sequence[int], keep: bool = True) -> fx.Node:
        return self.everywhere(self.call(torch.sum, x, list(dims), keep))

    def number(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """How many elements a sum over `dims` is of."""
        total: Any = self.ranks.world_size
        for dim in dims:
            total = self.call(operator.mul, self.call(aten.sym_size.int, x, dim), total)
        return total

    def mean(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        return self.call(torch.div, self.sum(x, dims), self.number(x, dims))

    def mean_and_squares(self, x: fx.Node, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The mean, x without it, and the sum of its squares: in this order nothing cancels."""
        mean = self.mean(x, dims)
        centred = self.call(torch.sub, x, mean)
        return mean, centred, self.sum(self.call(torch.mul, centred, centred), dims)

    def largest(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Without a gradient."""
        local = self.call(aten.amax.default, self.call(aten.detach.default, x), list(dims), True)
        return self.call(zeco.all_max.default, local, self.ranks.group)

    def extreme(self, x: fx.Node, dims: Sequence[int], floating: bool, smallest: bool) -> fx.Node:
        """The largest or smallest element; its gradient is shared by all that are equal to it, on whatever rank."""
        turned = aten.neg.default if floating else aten.bitwise_not.default
        found = self.largest(self.call(turned, x) if smallest else x, dims)
        found = self.call(turned, found) if smallest else found
        if not floating:
            return found
        alike = self.call(torch.eq, x, found)
        share = self.call(torch.div, self.call(torch.where, alike, x, 0), self.sum(alike, dims))
        value = self.sum(share, dims)
        # The shares of several add up to the extreme but for rounding.
        gradient = self.call(torch.sub, value, self.call(aten.detach.default, value))
        exact = self.call(torch.add, found, gradient)
        return self.call(torch.where, self.call(torch.isfinite, found), exact, value)

    def root(self, x: fx.Node) -> fx.Node:
        """The square root; where that is zero the gradient is zero, as PyTorch has it for norms and deviations."""
        positive = self.call(torch.gt, x, 0)
        root = self.call(torch.sqrt, self.call(torch.where, positive, x, 1))
        rest = self.call(torch.sqrt, self.call(aten.detach.default, x))
        return self.call(torch.where, positive, root, rest)


@dataclass(frozen=True)
class Rule:
    emit: Callable[..., Any]
    """(over, ATen node, its tensors in the user's graph) -> the result, a tuple of them for several."""
    applies: Callable[[fx.Node], bool] = lambda node: True


_HALVES = (torch.float16, torch.bfloat16)
_ALONG = (aten._softmax.default, aten._log_softmax.default)


def rule_of(analysis: Analysis, node: fx.Node) -> Rule | None:
    """What computes an op over all ranks, where that is what the op is."""
    if _picks_positions(analysis, node):
        return _PICKED
    return _RULES.get(node.target) if _is_over_all(analysis, node) else None


def _picks_positions(analysis: Analysis, node: fx.Node) -> bool:
    """The negative log likelihood of labels that are positions: the classes are the whole sequence, and nothing else
    has rows of it."""
    if node.target not in _NLL_LOSSES or kinds(analysis, node) != {"look-up"}:
        return False
    scores, labels = operand(node, 0), operand(node, 1)
    classes = _class_dim(scores)
    return (
        analysis.track.sequence_dims(scores) == [classes]
        and analysis.track.axes.is_whole_sequence(analysis.track.dims(scores)[classes])
        and not analysis.track.sequence_dims(labels)
        and not analysis.is_misaligned(node)
    )


def _is_over_all(analysis: Analysis, node: fx.Node) -> bool:
    """The op's dimensions have the sequence, and all of it: no chunks of it, no windows."""
    if not kinds(analysis, node) <= {"reduce", "along"}:
        return False
    axes, source = analysis.track.axes, tensors(node)[0]
    rows = set(axes.flat((axes.sequence,)))
    if node.target in _ALONG:
        dims = [argument(node, "dim") % source.meta["val"].dim()]
        return analysis.track.sequence_dims(source) == dims
    acted = {atom for action in analysis.own_mixing(node) for atom in axes.flat(action.dim) if atom.sequence}
    results = [node, *(user for user in node.users if user.target is operator.getitem)]
    return acted == rows and not any(analysis.track.sequence_dims(result) for result in results)


def _dims(node: fx.Node) -> list[int]:
    rank = tensors(node)[0].meta["val"].dim()
    given = argument(node, "dim")
    if isinstance(given, int):
        given = [given]
    return [dim % rank for dim in given] if given else list(range(rank))


def _is_real(node: fx.Node) -> bool:
    return all(n.meta["val"].dtype.is_floating_point for n in tensors(node))


def _finish(over: Over, node: fx.Node, x: fx.Node, value: Any = None) -> fx.Node:
    """Of a value with all dimensions what the op returns: its dimensions, its dtype."""
    if node.target not in _ALONG and not argument(node, "keepdim", False):
        x = over.call(aten.squeeze.dims, x, _dims(node))
    made = node.meta["val"] if value is None else value
    return over.call(aten.to.dtype, x, made.dtype)


def _softmax(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
    x = over.wide(x, tensors(node)[0].meta["val"].dtype)
    dims = _dims(node)
    shifted = over.call(torch.sub, x, over.largest(x, dims))
    powers = over.call(torch.exp, shifted)
    total = over.sum(powers, dims)
    if node.target is aten._softmax.default:
        return _finish(over, node, over.call(torch.div, powers, total))
    return _finish(over, node, over.call(torch.sub, shifted, over.call(torch.log, total)))


def _logsumexp(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
    x = over.wide(x, tensors(node)[0].meta["val"].dtype)
    dims = _dims(node)
    largest = over.largest(x, dims)
    largest = over.call(torch.where, over.call(torch.isinf, largest), 0, largest)
    total = over.sum(over.call(torch.exp, over.call(torch.sub, x, largest)), dims)
    return _finish(over, node, over.call(torch.add, over.call(torch.log, total), largest))


def _extreme(smallest: bool) -> Callable[..., Any]:
    def emit(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
        source = tensors(node)[0]
        found = over.extreme(
            over.wide(x, source.meta["val"].dtype),
            _dims(node),
            source.meta["val"].dtype.is_floating_point,
            smallest,
        )
        return _finish(over, node, found)

    return emit


def _variance(over: Over, node: fx.Node, x: fx.Node) -> Any:
    x = over.wide(x, tensors(node)[0].meta["val"].dtype)
    dims = _dims(node)
    mean, _, squares = over.mean_and_squares(x, dims)
    count = over.call(operator.sub, over.number(x, dims), _correction(node))
    variance = over.call(torch.div, squares, count)
    if node.target in (aten.std.correction, aten.std_mean.correction):
        variance = over.root(variance)
    if isinstance(node.meta["val"], torch.Tensor):
        return _finish(over, node, variance)
    return tuple(
        _finish(over, node, part, value)
        for part, value in zip((variance, mean), node.meta["val"], strict=True)
    )


def _correction(node: fx.Node) -> Any:
    correction = argument(node, "correction")
    return 1 if correction is None else correction


def _has_few_corrections(node: fx.Node) -> bool:
    return _is_real(node) and isinstance(_correction(node), int | float) and 0 <= _correction(node) <= 1


def _norm(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
    x = over.wide(x, tensors(node)[0].meta["val"].dtype)
    dims, order = _dims(node), argument(node, "ord", 2)
    if order == 2:
        return _finish(over, node, over.root(over.sum(over.call(torch.mul, x, x), dims)))
    size = over.call(torch.abs, x)
    return _finish(over, node, over.sum(size, dims) if order == 1 else over.extreme(size, dims, True, False))


def _is_known_norm(node: fx.Node) -> bool:
    same = argument(node, "dtype") in (None, tensors(node)[0].meta["val"].dtype)
    return _is_real(node) and same and argument(node, "ord", 2) in (1, 2, float("inf"))


def _truth(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
    found = over.call(node.target, x, *node.args[1:], **node.kwargs)
    if node.target.overloadpacket is aten.any:  # type: ignore[union-attr]
        return over.call(zeco.all_max.default, found, over.ranks.group)
    some = over.call(zeco.all_max.default, over.call(torch.logical_not, found), over.ranks.group)
    return over.call(torch.logical_not, some)


def _sum(over: Over, node: fx.Node, x: fx.Node) -> fx.Node:
    source, made = tensors(node)[0].meta["val"], node.meta["val"]
    x = over.wide(x, tensors(node)[0].meta["val"].dtype)
    if not source.dtype.is_floating_point:
        x = over.call(aten.to.dtype, x, made.dtype)
    dims = _dims(node)
    mean = node.target in (aten.mean.default, aten.mean.dim)
    return _finish(over, node, over.mean(x, dims) if mean else over.sum(x, dims))


def _loss(over: Over, node: fx.Node, *values: fx.Node) -> fx.Node:
    sources = tensors(node)
    env = dict(zip(sources, values, strict=True))
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    each = [0 if name == "reduction" else argument(node, name) for name in names]
    x = over.call(node.target, *fx.map_arg(each, env.__getitem__))
    rank = max(source.meta["val"].dim() for source in sources)
    x = over.wide(x, sources[0].meta["val"].dtype)
    dims = list(range(rank))
    total = over.sum(x, dims, False)
    if argument(node, "reduction", 1) == 1:
        total = over.call(torch.div, total, over.number(x, dims))
    return over.call(aten.to.dtype, total, node.meta["val"].dtype)


def _nll_loss(over: Over, node: fx.Node, *values: fx.Node) -> Any:
    env = dict(zip(tensors(node), values, strict=True))
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    each = [_AS_SUM if name == "reduction" else argument(node, name) for name in names]
    found = over.call(node.target, *fx.map_arg(each, env.__getitem__))
    total, weight = (over.everywhere(over.call(operator.getitem, found, place)) for place in (0, 1))
    if argument(node, "reduction") == 1:
        total = over.call(torch.div, total, weight)
    return total, weight


_AS_SUM = 2
_NLL_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def _class_dim(scores: fx.Node) -> int:
    return min(1, scores.meta["val"].dim() - 1)


def _picked(over: Over, node: fx.Node, scores: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Labels [N, ...] are positions of the whole sequence, scores [N, T, ...] (or [T]) those of the slice: each is
    looked up by the rank that has it. Labels that no rank has raise, as they do without ranks."""
    made, dim = node.meta["val"], _class_dim(operand(node, 0))
    scores = over.wide(scores, operand(node, 0).meta["val"].dtype)
    length = over.call(aten.sym_size.int, scores, dim)
    whole = over.call(operator.mul, length, over.ranks.world_size)
    counts = over.call(torch.ne, labels, _ignored(over.emit.user_node))
    place = over.call(torch.sub, labels, over.call(operator.mul, length, over.ranks.rank))
    inside = [over.call(torch.ge, place, 0), over.call(torch.lt, place, length)]
    here = over.call(torch.logical_and, counts, over.call(torch.logical_and, *inside))
    known = [over.call(torch.ge, labels, 0), over.call(torch.lt, labels, whole)]
    elsewhere = over.call(
        torch.logical_or, over.call(torch.logical_and, *known), over.call(torch.eq, counts, False)
    )
    index = over.call(torch.where, here, place, over.call(torch.where, elsewhere, 0, whole))
    found = over.call(torch.gather, scores, dim, over.call(torch.unsqueeze, index, dim))
    found = over.call(torch.squeeze, found, dim)
    losses = over.everywhere(over.call(torch.where, here, over.call(torch.neg, found), 0))
    number = over.call(aten.to.dtype, over.call(torch.sum, counts), made[1].dtype)
    if argument(node, "reduction") != 0:
        losses = over.call(torch.sum, losses)
    if argument(node, "reduction") == 1:
        losses = over.call(torch.div, losses, number)
    return over.call(aten.to.dtype, losses, made[0].dtype), number


def _ignored(user_node: fx.Node) -> Any:
    """The label that does not count, as the call has it by now: `ignore_index=x.shape[1]` is the whole length."""
    names = ("input", "target", "weight", "size_average", "ignore_index")
    return call_arguments(user_node, names).get("ignore_index", -100)


def _has_no_weights(node: fx.Node) -> bool:
    """Weights of classes that are positions would be as long as the whole sequence."""
    return argument(node, "weight") is None


_RULES: dict[Any, Rule] = {
    aten._softmax.default: Rule(_softmax, _is_real),
    aten._log_softmax.default: Rule(_softmax, _is_real),
    aten.logsumexp.default: Rule(_logsumexp, _is_real),
    **dict.fromkeys((aten.amax.default, aten.max.default), Rule(_extreme(False))),
    **dict.fromkeys((aten.amin.default, aten.min.default), Rule(_extreme(True))),
    **dict.fromkeys(
        (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
        Rule(_variance, _has_few_corrections),
    ),
    aten.linalg_vector_norm.default: Rule(_norm, _is_known_norm),
    **dict.fromkeys(
        (aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims), Rule(_truth)
    ),
    **dict.fromkeys(
        (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        Rule(_sum, lambda node: not node.meta["val"].dtype.is_complex),
    ),
    **dict.fromkeys(
        (
            aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
            aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        Rule(_loss, _is_real),
    ),
    **dict.fromkeys(_NLL_LOSSES, Rule(_nll_loss, lambda node: isinstance(argument(node, "ignore_index"), int))),
}  # fmt: skip

_PICKED = Rule(_picked, _has_no_weights)
