"""Rules for normalisation by statistics over positions: batch, instance and group normalisation, over all ranks.

The statistics are those of all ranks' positions: first the mean, then the squares of what is left, so that nothing
cancels. Running statistics are updated with them, equally on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.over_all_ranks import Over
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    call_arguments,
    is_local,
    kinds,
    mixing_nodes,
    substitute,
)
from zeco_compile.passes.region import Sizes

aten = torch.ops.aten
functional = torch.nn.functional


def normalisation(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`F.batch_norm` in training, `F.instance_norm`, `F.group_norm` of x: [B, C, ...] or [N, C], any with the sequence
    in a dimension other than C (the first of them), or among the last (the others)."""
    names = _NAMES.get(user_node.target)
    mixing = mixing_nodes(analysis, user_node)
    if names is None or len(mixing) != 1 or kinds(analysis, mixing[0]) != {"reduce"}:
        return None
    given = call_arguments(user_node, names)
    source = analysis.shadow.reads.get((user_node, given["input"]))
    if not isinstance(source, fx.Node) or not is_local(analysis, source) or analysis.is_window(source):
        return None
    value, along = source.meta["val"], analysis.track.sequence_dims(source)
    batch = user_node.target is functional.batch_norm
    dims = [dim for dim in range(value.dim()) if dim != 1 and (batch or dim > 1)]
    if len(along) != 1 or along[0] not in dims or not value.dtype.is_floating_point:
        return None
    running = [given.get(name) for name in ("running_mean", "running_var")]
    if any(each is not None for each in running):
        known = all(isinstance(each, fx.Node) for each in running) and isinstance(
            given.get("momentum", 0.1), float
        )
        if not batch or not known:
            return None

    def apply(ranks: Ranks) -> None:
        over = Over(Emit(user_node, after=False), ranks)
        given = call_arguments(user_node, names)  # as they are by then
        running = [given.get(name) for name in ("running_mean", "running_var")]
        x = over.wide(given["input"], value.dtype)
        grouped = user_node.target is functional.group_norm
        if grouped:
            x = over.call(torch.unflatten, x, 1, (given["num_groups"], -1))
        reduced = [dim + 1 for dim in (1, *dims)] if grouped else dims
        mean, centred, squares = over.mean_and_squares(x, reduced)
        count = over.number(x, reduced)
        variance = over.call(torch.div, squares, count)
        scale = over.call(torch.rsqrt, over.call(torch.add, variance, given.get("eps", 1e-5)))
        out = over.call(torch.mul, centred, scale)
        if grouped:
            out = over.call(torch.flatten, out, 1, 2)
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if given.get(name) is not None:
                out = over.call(combine, out, _of_channels(over, given[name], value.dim()))
        if running[0] is not None:
            rest = over.call(operator.sub, count, 1)
            _update(over, running, (mean, over.call(torch.div, squares, rest)), given.get("momentum", 0.1))
        substitute(user_node, over.call(aten.to.dtype, out, value.dtype))

    what = user_node.target.__name__  # type: ignore[union-attr]
    channels = (
        Sizes(analysis, analysis.real_length).of_dim(analysis.track.dims(source)[1]) * value.dtype.itemsize
    )
    sent = 2 * channels if batch else 2 * bytes_of(analysis, source, along[0])
    return Plan(
        "all-reduce",
        f"{what} with the mean and the variance over all ranks",
        apply,
        (("among all ranks", int(sent)),),
    )


_NAMES: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (
        "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
    ),
    functional.instance_norm: (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
    ),
    functional.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}  # fmt: skip


def _of_channels(over: Over, parameter: fx.Node, rank: int) -> fx.Node:
    """[C] as [C, 1, ...], to go with [B, C, ...]."""
    return over.call(aten.reshape.default, parameter, [-1, *[1] * (rank - 2)])


def _update(over: Over, running: Sequence[Any], found: Sequence[fx.Node], momentum: float) -> None:
    for buffer, new in zip(running, found, strict=True):
        new = over.call(aten.reshape.default, over.call(aten.detach.default, new), [-1])
        part = over.call(torch.mul, new, momentum)
        whole = over.call(torch.add, over.call(torch.mul, buffer, 1 - momentum), part)
        over.call(aten.copy_.default, buffer, whole)
