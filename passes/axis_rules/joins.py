"""Ops that put tensors together: joined, repeated, padded, written into another."""

from __future__ import annotations

from torch import fx

from zeco_compile.passes.axes import Dim
from zeco_compile.passes.axis_rules.registry import ops, positive, rule
from zeco_compile.passes.schema import argument, operand, operands, shape, tensors
from zeco_compile.passes.sizes import Size, size_of
from zeco_compile.passes.tracking import Tracking


@rule(*ops("cat"))
def cat(track: Tracking, node: fx.Node) -> None:
    parts = [n for n in operands(node) if shape(n) != (0,)]
    if len(parts) == 1:
        track.out(node, track.dims(parts[0]))
        return
    rank = len(shape(node))
    dim = positive(argument(node, "dim", 0), rank)
    joined = [track.dims(n)[dim] for n in parts]
    rest = track.broadcast([(*track.dims(n)[:dim], (), *track.dims(n)[dim + 1 :]) for n in parts])
    size = shape(node)[dim]
    along = any(track.axes.is_sequence(d) for d in joined) or any(track.stepwise(n) for n in parts)
    for d in joined:
        track.act(node, d, "cat")
    rows = track.axes.rows_in_chunks(size) if along else None
    rows = rows or _behind_others(track, joined, [shape(n)[dim] for n in parts])
    track.out(node, (*rest[:dim], rows or track.axes.fresh(size, "cat"), *rest[dim + 1 :]))


def _behind_others(track: Tracking, joined: list[Dim], sizes: list[Size]) -> Dim | None:
    """The sequence with some rows of something else in front, as padding makes it."""
    if len(joined) != 2 or isinstance(track.axes.length, int) or not isinstance(sizes[0], int):
        return None
    if track.axes.is_sequence(joined[0]) or not track.axes.is_whole_sequence(joined[1]):
        return None
    return track.axes.window(sizes[0], 0)


@rule(*ops("stack"))
def stack(track: Tracking, node: fx.Node) -> None:
    parts = operands(node)
    dims = track.broadcast([track.dims(n) for n in parts])
    dim = positive(argument(node, "dim", 0), len(dims) + 1)
    size = shape(node)[dim]
    along = all(track.stepwise(n) for n in parts) and track.axes.is_length(size)
    new = (track.axes.sequence,) if along else track.axes.fresh(size, "stack")
    track.act(node, new, "cat")
    track.out(node, (*dims[:dim], new, *dims[dim:]))


@rule(*ops("repeat"))
def repeat(track: Tracking, node: fx.Node) -> None:
    source, times = tensors(node)[0], argument(node, "repeats")
    dims = ((),) * (len(times) - len(shape(source))) + track.dims(source)
    new: list[Dim] = []
    for dim, count in zip(dims, times, strict=True):
        copies = track.axes.fresh(size_of(count), "broadcast") if not isinstance(count, fx.Node) else None
        if copies is None:
            track.act(node, dim, "repeat")
            copies = track.axes.fresh(size_of(count.meta["val"]), "broadcast")
        elif copies and track.axes.is_sequence(dim):
            track.act(node, dim, "repeat")
        new.append((*copies, *dim))
    track.out(node, tuple(new))


@rule(*ops("select_scatter"))
def select_scatter(track: Tracking, node: fx.Node) -> None:
    into, source = operand(node, 0), operand(node, 1)
    dims = track.dims(into)
    dim = positive(argument(node, "dim"), len(dims))
    rest = track.broadcast([(*dims[:dim], *dims[dim + 1 :]), track.dims(source)])
    written = dims[dim]
    if track.stepwise(source) and track.axes.is_length(shape(node)[dim]):
        written = track.unified(node, written, (track.axes.sequence,))
    track.act(node, written, "scatter")
    track.out(node, (*rest[:dim], written, *rest[dim:]))


@rule(*ops("slice_scatter"))
def slice_scatter(track: Tracking, node: fx.Node) -> None:
    into, source = operand(node, 0), operand(node, 1)
    dims = track.dims(into)
    dim = positive(argument(node, "dim", 0), len(dims))
    src = track.dims(source)
    rest = track.broadcast([(*dims[:dim], (), *dims[dim + 1 :]), (*src[:dim], (), *src[dim + 1 :])])
    written = dims[dim]
    if same := (shape(source)[dim] == shape(node)[dim]):
        written = track.unified(node, written, src[dim])
    elif track.axes.is_sequence(src[dim]) and track.axes.is_length(shape(node)[dim]):
        written = track.unified(node, written, (track.axes.sequence,))
    else:  # rows of the sequence would become those of something else
        track.act(node, src[dim], "unknown")
    if not same:
        track.act(node, written, "scatter")
    track.out(node, (*rest[:dim], written, *rest[dim + 1 :]))


@rule(*ops("constant_pad_nd", "pad"))
def pad(track: Tracking, node: fx.Node) -> None:
    source, amounts = tensors(node)[0], list(argument(node, "pad"))
    dims, sizes = list(track.dims(source)), shape(node)
    for i in range(len(amounts) // 2):
        dim = len(dims) - 1 - i
        left, right = (track.number(a) for a in amounts[2 * i : 2 * i + 2])
        if left == 0 and right == 0:
            continue
        track.act(node, dims[dim], "pad")
        dims[dim] = track.padded(dims[dim], left, right, sizes[dim])
    track.out(node, tuple(dims))
