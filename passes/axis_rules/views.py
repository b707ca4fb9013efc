"""Ops that name the same elements in another way: reshapes, transposes, parts, windows."""

from __future__ import annotations

import operator

from torch import fx

from zeco_compile.passes.axes import Dim, Dims
from zeco_compile.passes.axis_rules.registry import dim_list, ops, positive, rule
from zeco_compile.passes.schema import argument, operand, shape, tensors
from zeco_compile.passes.sizes import same_size, size_of
from zeco_compile.passes.tracking import Tracking


@rule(*ops("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"))
def view(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = track.axes.regroup(track.dims(source), shape(node))
    if dims is None:
        track.opaque(node, "a reshape that cuts across axes")
    else:
        track.out(node, tuple(dims))


@rule(*ops("view_as_real"))
def pairs_of_complex(track: Tracking, node: fx.Node) -> None:
    track.out(node, (*track.dims(operand(node, 0)), track.axes.fresh(2, "parts")))


@rule(*ops("view_as_complex"))
def complex_of_pairs(track: Tracking, node: fx.Node) -> None:
    *dims, parts = track.dims(operand(node, 0))
    if track.axes.is_sequence(parts):
        track.opaque(node, "two tokens that are made one complex number")
    else:
        track.out(node, tuple(dims))


@rule(*ops("expand", "expand_copy"))
def expand(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    sizes = shape(node)
    missing = len(sizes) - len(shape(source))
    dims = ((),) * missing + track.dims(source)
    before = (1,) * missing + shape(source)
    out: list[Dim] = []
    for dim, old, new in zip(dims, before, sizes, strict=True):
        if dim and same_size(old, 1) and not same_size(new, 1):
            track.act(node, dim, "unknown")  # the one token of a rank, copied along an axis
            out.append(track.axes.fresh(new, "broadcast"))
        else:
            out.append(dim or track.axes.fresh(new, "broadcast"))
    track.out(node, tuple(out))


@rule(*ops("permute"))
def permute(track: Tracking, node: fx.Node) -> None:
    source = track.dims(tensors(node)[0])
    track.out(node, tuple(source[positive(d, len(source))] for d in argument(node, "dims")))


@rule(*ops("transpose"))
def transpose(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    a, b = (positive(argument(node, name), len(dims)) for name in ("dim0", "dim1"))
    dims[a], dims[b] = dims[b], dims[a]
    track.out(node, tuple(dims))


@rule(*ops("t", "numpy_T"))
def t(track: Tracking, node: fx.Node) -> None:
    track.out(node, tuple(reversed(track.dims(tensors(node)[0]))))


@rule(*ops("unsqueeze"))
def unsqueeze(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dims.insert(positive(argument(node, "dim"), len(dims) + 1), ())
    track.out(node, tuple(dims))


@rule(*ops("squeeze"))
def squeeze(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims, sizes = track.dims(source), shape(source)
    which = dim_list(argument(node, "dim"), len(dims))
    keep = [i for i in range(len(dims)) if i not in which or sizes[i] != 1]
    for i in range(len(dims)):
        if i not in keep and track.axes.is_sequence(dims[i]):
            track.act(node, dims[i], "squeeze")  # one token per rank: the axis would be lost
    track.out(node, tuple(dims[i] for i in keep))


@rule(*ops("select"))
def select(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    removed = dims.pop(positive(argument(node, "dim"), len(dims)))
    track.act(node, removed, "select")
    track.out(node, tuple(dims))


@rule(*ops("slice"))
def slice_(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims, sizes = list(track.dims(source)), shape(source)
    dim = positive(argument(node, "dim"), len(dims))
    dims[dim] = track.slice(node, dims[dim], sizes[dim], shape(node)[dim])
    track.out(node, tuple(dims))


@rule(*ops("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"))
def split(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = track.dims(source)
    dim = positive(argument(node, "dim", 0), len(dims))
    sizes = [tuple(size_of(s) for s in part.shape) for part in node.meta["val"]]
    whole = len(sizes) == 1
    if not whole:
        track.act(node, dims[dim], "split")
    parts: list[Dims] = []
    for part in sizes:
        new = dims[dim] if whole else track.axes.fresh(part[dim], "slice")
        parts.append((*dims[:dim], new, *dims[dim + 1 :]))
    track.outs(node, parts)


@rule(*ops("unbind"))
def unbind(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    removed = dims.pop(positive(argument(node, "dim", 0), len(dims)))
    track.act(node, removed, "select")
    track.outs(node, [tuple(dims)] * len(node.meta["val"]))


@rule(operator.getitem)
def getitem(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.dims_of_output(operand(node, 0), node.args[1]))  # type: ignore[arg-type]


@rule(*ops("unfold"))
def unfold(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = list(track.dims(source))
    dim = positive(argument(node, "dimension"), len(dims))
    size, step = argument(node, "size"), argument(node, "step")
    dims[dim] = track.windowed(node, dims[dim], reach=size - 1, step=step, size=shape(node)[dim])
    track.out(node, (*dims, track.axes.fresh(size, "window offset")))


@rule(*ops("diag_embed"))
def diagonal_matrix(track: Tracking, node: fx.Node) -> None:
    """Rows and columns are the same axis."""
    if argument(node, "offset", 0) != 0:
        track.opaque(node, "a diagonal beside the main one")
        return
    *dims, along = track.dims(tensors(node)[0])
    track.act(node, along, "position")
    for dim in sorted(
        positive(argument(node, name, d), len(dims) + 2) for name, d in (("dim1", -2), ("dim2", -1))
    ):
        dims.insert(dim, along)
    track.out(node, tuple(dims))


@rule(*ops("diagonal", "as_strided", "set_", "resize"))
def opaque_view(track: Tracking, node: fx.Node) -> None:
    track.opaque(node, "a view that is not followed")
