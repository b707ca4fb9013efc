"""The ops of this package."""

from __future__ import annotations

import torch
from torch import fx

import zeco_compile.lowering  # noqa: F401  (importing it registers the ops)
from zeco_compile.passes.axis_rules.elementwise import pointwise
from zeco_compile.passes.axis_rules.registry import rule
from zeco_compile.passes.schema import argument, operand, shape
from zeco_compile.passes.tracking import Tracking

zeco = torch.ops.zeco
rule(zeco.log_decay.default)(pointwise)


@rule(zeco.halo.default)
def halo(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(operand(node, 0)))
    dim, left, right = (track.number(argument(node, name)) for name in ("dim", "left", "right"))
    dims[dim] = track.padded(dims[dim], left, right, shape(node)[dim])
    track.out(node, tuple(dims))


@rule(zeco.all_sum.default, zeco.all_max.default)
def same_everywhere(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.dims(operand(node, 0)))


@rule(zeco.from_rank.default)
def from_one_rank(track: Tracking, node: fx.Node) -> None:
    """Some rows of one rank's slice are rows of no slice on the others."""
    dims = track.dims(operand(node, 0))
    rows = zip(dims, shape(node), strict=True)
    track.out(
        node,
        tuple(track.axes.fresh(size, "rows") if track.axes.is_sequence(dim) else dim for dim, size in rows),
    )


@rule(zeco.flip_sequence.default)
def flipped(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(operand(node, 0))
    track.act(node, dims[argument(node, "dim")], "along")
    track.out(node, dims)


@rule(zeco.at_rank.default)
def flag(track: Tracking, node: fx.Node) -> None:
    track.out(node, ((),))


@rule(zeco.ranks_before.default)
def flags_of_ranks(track: Tracking, node: fx.Node) -> None:
    track.out(node, (track.axes.fresh(shape(node)[0], "gathered"),))


@rule(zeco.rows_followed.default)
def flags_of_rows(track: Tracking, node: fx.Node) -> None:
    track.out(node, (track.dims(operand(node, 0))[argument(node, "dim")],))


@rule(zeco.gather_sequence.default)
def gathered(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(operand(node, 0)))
    dim = argument(node, "dim")
    # Only rows of the slice are gathered: `table[: x.shape[1]]` may be known to be such by nothing else.
    track.unified(node, dims[dim], (track.axes.sequence,))
    dims[dim] = track.axes.fresh(shape(node)[dim], "gathered")
    track.out(node, tuple(dims))


@rule(zeco.slice_sequence.default)
def sliced(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(operand(node, 0)))
    dims[argument(node, "dim")] = (track.axes.sequence,)
    track.out(node, tuple(dims))


@rule(zeco.diagonal.default)
def attention_output(track: Tracking, node: fx.Node) -> None:
    q, k, v, g = (track.dims(n) if isinstance(n, fx.Node) else () for n in node.args[:4])
    shared = track.broadcast([q[:3], k[:3], v[:3], g[:3]])
    track.unified(node, q[3], k[3])
    track.out(node, (*shared, v[3]))


@rule(zeco.combine.default)
def attention_corrected(track: Tracking, node: fx.Node) -> None:
    o, q = track.dims(operand(node, 0)), track.dims(operand(node, 1))
    state = track.dims(operand(node, 3))
    for own, other in zip(state, (o[0], o[2], q[3], o[3]), strict=True):
        track.unified(node, own, other)
    track.out(node, o)


@rule(zeco.carry_before.default)
def carry_before(track: Tracking, node: fx.Node) -> None:
    steps = track.dims(operand(node, 1))[0]
    track.act(node, steps, "carry")
    track.out(node, (steps, *track.dims(operand(node, 0))))


@rule(zeco.carry_after.default)
def carry_after(track: Tracking, node: fx.Node) -> None:
    before, value = operand(node, 0), operand(node, 1)
    track.out(node, track.broadcast([track.dims(before), track.dims(value)]))


@rule(zeco.rank_state.default)
def attention_state(track: Tracking, node: fx.Node) -> None:
    k, v, g = (track.dims(n) if isinstance(n, fx.Node) else () for n in node.args[:3])
    batch, _, heads = track.broadcast([k[:3], v[:3], g[:3]])
    track.outs(node, [(batch, heads, k[3], v[3]), (batch, heads, ())])


@rule(zeco.running_maximum.default)
def running_maximum(track: Tracking, node: fx.Node) -> None:
    g, k, initial = (track.dims(operand(node, i)) for i in range(3))
    dims = track.broadcast([g, k, ((), *initial)])
    track.act(node, dims[0], "along")
    track.outs(node, [dims, dims])


@rule(zeco.recurrence_states.default)
def recurrence_states(track: Tracking, node: fx.Node) -> None:
    dims = track.broadcast([track.dims(operand(node, i)) for i in (0, 1)])
    state = track.dims(operand(node, 2))
    for own, other in zip(state, (dims[0], *dims[2:]), strict=True):
        track.unified(node, own, other)
    track.out(node, dims)


@rule(zeco.last_state.default)
def last_state(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.dims(operand(node, 1)))
