"""What every ATen op does to axes: which output dimension is which input dimension, and along which it acts.

An op acts along an axis if an output at one place of that axis depends on inputs at another, or on where it is.
One rule per kind of op; `rule_for(op)` finds it. A rule gets the node and the `Tracking` and calls `track.out`
with the dimensions of each output and `track.act` for each dimension acted along. An op without a rule acts along
everything it touches: what is not known is not proven local.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

import zeco_compile.lowering  # noqa: F401  (importing it registers the ops)
from zeco_compile.passes import torch_private
from zeco_compile.passes.axes import Atom, Dim, Dims
from zeco_compile.passes.schema import argument, operand, operands, shape, tensors
from zeco_compile.passes.sizes import Size, SizeFacts, same_size, size_of
from zeco_compile.passes.tracking import Tracking

aten = torch.ops.aten
Rule = Callable[[Tracking, fx.Node], None]
_RULES: dict[Any, Rule] = {}


def rule_for(target: Any) -> Rule | None:
    """The rule of an op overload; None if there is none."""
    if target in _RULES:
        return _RULES[target]
    packet = getattr(target, "overloadpacket", None)
    if packet in _RULES:
        return _RULES[packet]
    if is_grouped_product(target):
        return grouped_product
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return pointwise
    return None


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for target in targets:
            if target is not None:
                _RULES[target] = function
        return function

    return register


def _ops(*names: str) -> list[Any]:
    """Op packets by name; names that this PyTorch does not have are left out."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


def _positive(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _dim_list(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    return [_positive(d, rank) for d in (dim if isinstance(dim, list | tuple) else [dim])]


# ------------------------------------------------------------------------------------------------ elementwise


@rule(*_ops("clone", "_to_copy", "detach", "alias", "lift_fresh_copy", "masked_fill", "copy", "where"))
@rule(*_ops("rand_like", "randn_like", "bernoulli"))
@rule(
    *_ops("native_dropout", "addcmul", "addcdiv", "lerp", "nan_to_num", "gelu", "silu", "logit", "hardtanh")
)
@rule(*_ops("softplus", "leaky_relu", "elu", "threshold", "log_sigmoid_forward", "view_of", "contiguous"))
@rule(*_ops("prelu", "_prelu_kernel", "mish", "hardswish", "hardsigmoid", "celu", "glu_jvp", "fill", "pow"))
@rule(*_ops("floor_divide", "rsub", "isclose"))
@rule(*_ops("complex", "polar", "_conj", "_neg_view", "resolve_conj", "resolve_neg"))
@rule(*_ops("bitwise_and", "bitwise_or", "logical_and", "logical_or", "logical_not", "isnan", "isfinite"))
def pointwise(track: Tracking, node: fx.Node) -> None:
    dims = track.broadcast([track.dims(n) for n in tensors(node)])
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, dims)
    else:  # (result, mask or saved value); an empty saved value has no axes
        track.outs(node, [dims if len(s) == len(dims) else () for s in track.output_sizes(node)])


@rule(*_ops("zeros_like", "ones_like", "full_like", "empty_like"))
def shaped_like(track: Tracking, node: fx.Node) -> None:
    """Of the rows of the sequence it has one for each. Its other axes are as long as those of what it is like, and no
    more: `zeros_like(q)` may be where the outputs go, with the features of v."""
    source = track.dims(tensors(node)[0])
    sizes = shape(node)
    track.out(
        node,
        tuple(
            dim if track.axes.is_sequence(dim) or track.only_unit(dim) else track.axes.fresh(size, "factory")
            for dim, size in zip(source, sizes, strict=True)
        ),
    )


# ------------------------------------------------------------------------------------------------------ views


@rule(*_ops("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"))
def view(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = track.axes.regroup(track.dims(source), shape(node))
    if dims is None:
        track.opaque(node, "a reshape that cuts across axes")
    else:
        track.out(node, tuple(dims))


@rule(aten.view_as_real.default)
def pairs_of_complex(track: Tracking, node: fx.Node) -> None:
    track.out(node, (*track.dims(operand(node, 0)), track.axes.fresh(2, "parts")))


@rule(aten.view_as_complex.default)
def complex_of_pairs(track: Tracking, node: fx.Node) -> None:
    *dims, parts = track.dims(operand(node, 0))
    if track.axes.is_sequence(parts):
        track.opaque(node, "two tokens that are made one complex number")
    else:
        track.out(node, tuple(dims))


@rule(*_ops("expand", "expand_copy"))
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


@rule(*_ops("permute"))
def permute(track: Tracking, node: fx.Node) -> None:
    source = track.dims(tensors(node)[0])
    track.out(node, tuple(source[_positive(d, len(source))] for d in argument(node, "dims")))


@rule(*_ops("transpose"))
def transpose(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    a, b = (_positive(argument(node, name), len(dims)) for name in ("dim0", "dim1"))
    dims[a], dims[b] = dims[b], dims[a]
    track.out(node, tuple(dims))


@rule(*_ops("t", "numpy_T"))
def t(track: Tracking, node: fx.Node) -> None:
    track.out(node, tuple(reversed(track.dims(tensors(node)[0]))))


@rule(*_ops("unsqueeze"))
def unsqueeze(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dims.insert(_positive(argument(node, "dim"), len(dims) + 1), ())
    track.out(node, tuple(dims))


@rule(*_ops("squeeze"))
def squeeze(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims, sizes = track.dims(source), shape(source)
    which = _dim_list(argument(node, "dim"), len(dims))
    keep = [i for i in range(len(dims)) if i not in which or sizes[i] != 1]
    for i in range(len(dims)):
        if i not in keep and track.axes.is_sequence(dims[i]):
            track.act(node, dims[i], "squeeze")  # one token per rank: the axis would be lost
    track.out(node, tuple(dims[i] for i in keep))


@rule(*_ops("select"))
def select(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    removed = dims.pop(_positive(argument(node, "dim"), len(dims)))
    track.act(node, removed, "select")
    track.out(node, tuple(dims))


@rule(*_ops("slice"))
def slice_(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims, sizes = list(track.dims(source)), shape(source)
    dim = _positive(argument(node, "dim"), len(dims))
    dims[dim] = track.slice(node, dims[dim], sizes[dim], shape(node)[dim])
    track.out(node, tuple(dims))


@rule(*_ops("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"))
def split(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = track.dims(source)
    dim = _positive(argument(node, "dim", 0), len(dims))
    sizes = [tuple(size_of(s) for s in part.shape) for part in node.meta["val"]]
    whole = len(sizes) == 1
    if not whole:
        track.act(node, dims[dim], "split")
    parts: list[Dims] = []
    for part in sizes:
        new = dims[dim] if whole else track.axes.fresh(part[dim], "slice")
        parts.append((*dims[:dim], new, *dims[dim + 1 :]))
    track.outs(node, parts)


@rule(*_ops("unbind"))
def unbind(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    removed = dims.pop(_positive(argument(node, "dim", 0), len(dims)))
    track.act(node, removed, "select")
    track.outs(node, [tuple(dims)] * len(node.meta["val"]))


@rule(operator.getitem)
def getitem(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.dims_of_output(operand(node, 0), node.args[1]))  # type: ignore[arg-type]


@rule(*_ops("unfold"))
def unfold(track: Tracking, node: fx.Node) -> None:
    source = tensors(node)[0]
    dims = list(track.dims(source))
    dim = _positive(argument(node, "dimension"), len(dims))
    size, step = argument(node, "size"), argument(node, "step")
    dims[dim] = track.windowed(node, dims[dim], reach=size - 1, step=step, size=shape(node)[dim])
    track.out(node, (*dims, track.axes.fresh(size, "window offset")))


@rule(*_ops("diag_embed"))
def diagonal_matrix(track: Tracking, node: fx.Node) -> None:
    """Rows and columns are the same axis."""
    if argument(node, "offset", 0) != 0:
        track.opaque(node, "a diagonal beside the main one")
        return
    *dims, along = track.dims(tensors(node)[0])
    track.act(node, along, "position")
    for dim in sorted(
        _positive(argument(node, name, d), len(dims) + 2) for name, d in (("dim1", -2), ("dim2", -1))
    ):
        dims.insert(dim, along)
    track.out(node, tuple(dims))


@rule(*_ops("diagonal", "as_strided", "set_", "resize"))
def opaque_view(track: Tracking, node: fx.Node) -> None:
    track.opaque(node, "a view that is not followed")


# ----------------------------------------------------------------------------------------- joining, scattering


@rule(*_ops("cat"))
def cat(track: Tracking, node: fx.Node) -> None:
    parts = [n for n in operands(node) if shape(n) != (0,)]
    if len(parts) == 1:
        track.out(node, track.dims(parts[0]))
        return
    rank = len(shape(node))
    dim = _positive(argument(node, "dim", 0), rank)
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


@rule(*_ops("stack"))
def stack(track: Tracking, node: fx.Node) -> None:
    parts = operands(node)
    dims = track.broadcast([track.dims(n) for n in parts])
    dim = _positive(argument(node, "dim", 0), len(dims) + 1)
    size = shape(node)[dim]
    along = all(track.stepwise(n) for n in parts) and track.axes.is_length(size)
    new = (track.axes.sequence,) if along else track.axes.fresh(size, "stack")
    track.act(node, new, "cat")
    track.out(node, (*dims[:dim], new, *dims[dim:]))


@rule(*_ops("repeat"))
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


@rule(*_ops("select_scatter"))
def select_scatter(track: Tracking, node: fx.Node) -> None:
    into, source = operand(node, 0), operand(node, 1)
    dims = track.dims(into)
    dim = _positive(argument(node, "dim"), len(dims))
    rest = track.broadcast([(*dims[:dim], *dims[dim + 1 :]), track.dims(source)])
    written = dims[dim]
    if track.stepwise(source) and track.axes.is_length(shape(node)[dim]):
        written = track.unified(node, written, (track.axes.sequence,))
    track.act(node, written, "scatter")
    track.out(node, (*rest[:dim], written, *rest[dim:]))


@rule(*_ops("slice_scatter"))
def slice_scatter(track: Tracking, node: fx.Node) -> None:
    into, source = operand(node, 0), operand(node, 1)
    dims = track.dims(into)
    dim = _positive(argument(node, "dim", 0), len(dims))
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


@rule(*_ops("constant_pad_nd", "pad"))
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


# -------------------------------------------------------------------------------------------------- reductions

_REDUCTIONS = _ops(
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin", "logsumexp", "var",
    "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "count_nonzero", "median", "nanmedian", "aminmax",
    "nansum", "mode", "kthvalue",
)  # fmt: skip


@rule(*_REDUCTIONS)
def reduction(track: Tracking, node: fx.Node) -> None:
    inputs = tensors(node)
    if len(inputs) > 1:  # max.other, min.other
        pointwise(track, node)
        return
    dims = track.dims(inputs[0])
    which = _dim_list(argument(node, "dim", argument(node, "axis")), len(dims))
    keepdim = bool(argument(node, "keepdim", False))
    for d in which:
        track.act(node, dims[d], "reduce")
    out = tuple(() if i in which else d for i, d in enumerate(dims) if keepdim or i not in which)
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, out)
    else:
        track.outs(node, [out] * len(node.meta["val"]))


@rule(*_ops("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll"))
@rule(*_ops("cummax", "cummin", "sort", "argsort"))
def along(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    which = _dim_list(argument(node, "dim", argument(node, "dims", -1)), len(dims)) if dims else []
    for d in which:
        track.act(node, dims[d], "along")
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, dims)
    else:
        track.outs(node, [dims] * len(node.meta["val"]))


@rule(*_ops("renorm"))
def renorm(track: Tracking, node: fx.Node) -> None:
    """What it is given as `dim` is the one dimension over which it takes no norm."""
    dims = track.dims(tensors(node)[0])
    kept = _positive(argument(node, "dim"), len(dims))
    for i, dim in enumerate(dims):
        if i != kept:
            track.act(node, dim, "reduce")
    track.out(node, dims)


@rule(*_ops("topk"))
def topk(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dim = _positive(argument(node, "dim", -1), len(dims))
    track.act(node, dims[dim], "along")
    dims[dim] = track.axes.fresh(tuple(size_of(s) for s in node.meta["val"][0].shape)[dim], "topk")
    track.outs(node, [tuple(dims)] * 2)


@rule(*_ops("tril", "triu"))
def triangle(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[-2:]:
        track.act(node, dim, "triangle")
    track.out(node, dims)


@rule(*_ops("glu"))
def glu(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dim = _positive(argument(node, "dim", -1), len(dims))
    track.act(node, dims[dim], "split")
    dims[dim] = track.axes.fresh(shape(node)[dim], "slice")
    track.out(node, tuple(dims))


# ---------------------------------------------------------------------------------------------------- products


def _contract(track: Tracking, node: fx.Node, a: Dims, b: Dims) -> Dims:
    """[..., m, k] x [..., k, n] with equal batch dimensions."""
    inner = track.unified(node, a[-1], b[-2])
    track.act(node, inner, "contract")
    batch = track.broadcast([a[:-2], b[:-2]])
    return (*batch, a[-2], b[-1])


@rule(*_ops("mm", "bmm", "matmul"))
def product(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.out(node, _contract(track, node, a, b))


@rule(*_ops("addmm", "baddbmm"))
def added_product(track: Tracking, node: fx.Node) -> None:
    bias, a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1), operand(node, 2)))
    track.out(node, track.broadcast([_contract(track, node, a, b), bias]))


@rule(*_ops("linalg_inv_ex", "linalg_cholesky_ex"))
def of_matrices(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[-2:]:
        track.act(node, dim, "along")
    track.outs(node, [dims, dims[:-2]])


@rule(*_ops("mv"))
def matrix_vector(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.out(node, _contract(track, node, a, (*b, ()))[:-1])


@rule(*_ops("dot", "vdot"))
def dot(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.act(node, track.unified(node, a[0], b[0]), "contract")
    track.out(node, ())


_GROUPED_PRODUCTS = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
"""By name: a library's ops are there when it has been imported."""


def is_grouped_product(target: Any) -> bool:
    """An op that multiplies rows [S, K] with the weights [E, K, N] of their group; `offs` [E] says where groups end."""
    return isinstance(target, torch._ops.OpOverload) and target.name().split(".")[0] in _GROUPED_PRODUCTS


def grouped_product(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    if (len(a), len(b)) != (2, 3) or not isinstance(argument(node, "offs"), fx.Node):
        track.opaque(node, "groups of what is contracted")
        return
    track.act(node, track.unified(node, a[1], b[1]), "contract")
    track.act(node, a[0], "group")  # which weights a row gets depends on its place
    track.act(node, b[0], "look-up")
    track.out(node, (a[0], b[2]))


@rule(*_ops("convolution", "_convolution"))
def convolution(track: Tracking, node: fx.Node) -> None:
    source, weight, bias = operand(node, 0), operand(node, 1), node.args[2]
    dims, kernel = track.dims(source), shape(weight)[2:]
    groups = argument(node, "groups", 1)
    out = [dims[0], track.axes.fresh(shape(node)[1], "channels")]
    if groups == 1 or groups != shape(node)[1] or groups != shape(source)[1]:
        track.act(node, dims[1], "contract")
    else:  # depthwise: channels stay themselves
        out[1] = track.unified(node, out[1], dims[1])
        out[1] = track.unified(node, out[1], track.dims(weight)[0])
    if isinstance(bias, fx.Node):
        out[1] = track.unified(node, out[1], track.dims(bias)[0])
    transposed = bool(argument(node, "transposed", False))
    for i, width in enumerate(kernel):
        stride, padding, dilation = (
            track.number(argument(node, name)[i if len(argument(node, name)) > 1 else 0])
            for name in ("stride", "padding", "dilation")
        )
        dim, size = dims[2 + i], shape(node)[2 + i]
        reach = (width - 1) * dilation
        if width == 1 and stride == 1 and padding == 0:
            out.append(dim)
            continue
        track.act(node, dim, "convolve")
        if transposed or not isinstance(padding, int):
            out.append(track.axes.fresh(size, "convolution"))
        else:
            before = track.padded(dim, padding, padding, None)
            out.append(track.windowed(node, before, reach=reach, step=stride, size=size))
    track.out(node, tuple(out))


# ------------------------------------------------------------------------------------------------------- norms


@rule(*_ops("native_layer_norm", "_fused_rms_norm", "rms_norm"))
def layer_norm(track: Tracking, node: fx.Node) -> None:
    inputs = tensors(node)
    count = len(argument(node, "normalized_shape"))
    dims = track.dims(inputs[0])
    for dim in dims[len(dims) - count :]:
        track.act(node, dim, "reduce")
    for weight in inputs[1:]:
        track.broadcast([dims, track.dims(weight)])
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, dims)
        return
    statistics = tuple(() if i >= len(dims) - count else d for i, d in enumerate(dims))
    track.outs(node, [dims, statistics, statistics][: len(node.meta["val"])])


@rule(*_ops("native_group_norm"))
def group_norm(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[1:]:
        track.act(node, dim, "reduce")
    statistics = (dims[0], track.axes.fresh(argument(node, "group"), "groups"))
    track.outs(node, [dims, statistics, statistics])


@rule(*_ops("_native_batch_norm_legit", "native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm"))
@rule(
    *_ops(
        "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_native_batch_norm_legit_functional"
    )
)
def batch_norm(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    frozen = "no_training" in str(node.target) or argument(node, "training", True) is False
    if not frozen:
        for i, dim in enumerate(dims):
            if i != 1:
                track.act(node, dim, "reduce")
    outs: list[Dims] = [dims]
    for value in list(node.meta["val"])[1:]:
        sizes = tuple(size_of(s) for s in value.shape)
        outs.append(
            (dims[1],) if sizes == (shape(tensors(node)[0])[1],) else track.fresh_dims(sizes, "statistics")
        )
    track.outs(node, outs)


# ----------------------------------------------------------------------------------------------------- look-ups


@rule(*_ops("embedding"))
def embedding(track: Tracking, node: fx.Node) -> None:
    table, index = operand(node, 0), operand(node, 1)
    track.act(node, track.dims(table)[0], "look-up")
    if argument(node, "scale_grad_by_freq", False):
        for dim in track.dims(index):  # a row's gradient is divided by how often it was looked up, anywhere
            track.act(node, dim, "count")
    track.out(node, (*track.dims(index), track.dims(table)[1]))


@rule(*_ops("index", "_unsafe_index"))
def index(track: Tracking, node: fx.Node) -> None:
    source = operand(node, 0)
    indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    dims = track.dims(source)
    indices += [None] * (len(dims) - len(indices))
    picked = [i for i, n in enumerate(indices) if n is not None]
    if any(indices[i].meta["val"].dtype in (torch.bool, torch.uint8) for i in picked):
        track.opaque(node, "selection by a mask")
        return
    for i in picked:
        track.act(node, dims[i], "look-up")
    new = track.broadcast([track.dims(indices[i]) for i in picked])
    adjacent = picked == list(range(picked[0], picked[-1] + 1))
    if adjacent:
        track.out(node, (*dims[: picked[0]], *new, *dims[picked[-1] + 1 :]))
    else:
        track.out(node, (*new, *(d for i, d in enumerate(dims) if i not in picked)))


@rule(*_ops("index_select"))
def index_select(track: Tracking, node: fx.Node) -> None:
    source, which = operand(node, 0), operand(node, 2)
    dims = list(track.dims(source))
    dim = _positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "look-up")
    dims[dim] = track.dims(which)[0]
    track.out(node, tuple(dims))


@rule(*_ops("gather"))
def gather(track: Tracking, node: fx.Node) -> None:
    source, which = operand(node, 0), operand(node, 2)
    dims, wanted = track.dims(source), track.dims(which)
    dim = _positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "look-up")
    out = []
    for i, (a, b) in enumerate(zip(dims, wanted, strict=True)):
        if i == dim:
            out.append(b)
        elif shape(source)[i] == shape(which)[i]:
            out.append(track.broadcast([(a,), (b,)])[0])
        else:
            track.act(node, a, "look-up")
            out.append(b)
    track.out(node, tuple(out))


@rule(*_ops("scatter", "scatter_add", "scatter_reduce"))
def scatter(track: Tracking, node: fx.Node) -> None:
    inputs = tensors(node)
    dims = list(track.dims(inputs[0]))
    dim = _positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "scatter")
    for other in inputs[1:]:
        for i, d in enumerate(track.dims(other)):
            if i == dim:
                track.act(node, d, "scatter")
            elif shape(other)[i] == shape(inputs[0])[i]:
                dims[i] = track.broadcast([(dims[i],), (d,)])[0]
            else:
                track.act(node, dims[i], "scatter")
    track.out(node, tuple(dims))


@rule(*_ops("index_put"))
def index_put(track: Tracking, node: fx.Node) -> None:
    into, values = operand(node, 0), operand(node, 2)
    indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    dims = list(track.dims(into))
    given = [i for i, each in enumerate(indices) if each is not None]
    if (
        len(given) != 1
        or len(shape(indices[given[0]])) != 1
        or indices[given[0]].meta["val"].dtype is torch.bool
    ):
        track.opaque(node, "rows that are written to several places")
        return
    (at,) = given
    places = track.dims(indices[at])
    if same_size(shape(into)[at], shape(indices[at])[0]):  # as many as there are: perhaps each of them once
        dims[at] = track.unified(node, dims[at], places[0])
    track.broadcast([(*dims[:at], *places, *dims[at + 1 :]), track.dims(values)])
    track.act(node, dims[at], "scatter")
    track.act(node, places[0], "scatter")
    track.out(node, tuple(dims))


@rule(*_ops("index_add"))
def index_add(track: Tracking, node: fx.Node) -> None:
    into, places, source = operand(node, 0), operand(node, 2), operand(node, 3)
    dims = list(track.dims(into))
    at = _positive(argument(node, "dim"), len(dims))
    rest = track.broadcast(
        [(*dims[:at], (), *dims[at + 1 :]), (*track.dims(source)[:at], (), *track.dims(source)[at + 1 :])]
    )
    track.act(node, dims[at], "scatter")
    track.act(node, track.unified(node, track.dims(source)[at], track.dims(places)[0]), "scatter")
    track.out(node, (*rest[:at], dims[at], *rest[at + 1 :]))


@rule(*_ops("histc"))
def histogram(track: Tracking, node: fx.Node) -> None:
    for dim in track.dims(operand(node, 0)):
        track.act(node, dim, "reduce")
    track.out(node, track.fresh_dims(shape(node), "bins"))


@rule(*_ops("nll_loss_forward"))
def nll_loss(track: Tracking, node: fx.Node) -> None:
    source, target = operand(node, 0), operand(node, 1)
    dims = track.dims(source)
    track.act(node, dims[-1], "look-up")
    rows = track.broadcast([dims[:-1], track.dims(target)])
    if argument(node, "reduction") == 0:
        track.outs(node, [rows, ()])
        return
    for dim in rows:
        track.act(node, dim, "reduce")
    track.outs(node, [(), ()])


@rule(*_ops("nll_loss2d_forward"))
def nll_loss2d(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(operand(node, 0))
    track.act(node, dims[1], "look-up")
    rows = track.broadcast([(dims[0], *dims[2:]), track.dims(operand(node, 1))])
    if argument(node, "reduction") == 0:
        track.outs(node, [rows, ()])
        return
    for dim in rows:
        track.act(node, dim, "reduce")
    track.outs(node, [(), ()])


@rule(
    *_ops(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
    )
)
def elementwise_loss(track: Tracking, node: fx.Node) -> None:
    dims = track.broadcast([track.dims(n) for n in tensors(node)])
    if argument(node, "reduction", 1) == 0:
        track.out(node, dims)
        return
    for dim in dims:
        track.act(node, dim, "reduce")
    track.out(node, ())


# --------------------------------------------------------------------------------------------------- attention


@rule(
    *_ops(
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
def softmax_attention(track: Tracking, node: fx.Node) -> None:
    q, k, v = (track.dims(n) for n in (operand(node, 0), operand(node, 1), operand(node, 2)))
    for dim in (q[-2], k[-2], v[-2], q[-1], k[-1]):
        track.act(node, dim, "attend")
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    mask = next((argument(node, name) for name in ("attn_mask", "attn_bias") if name in names), None)
    if isinstance(mask, fx.Node):
        track.broadcast([(*q[:-1], k[-2]), track.dims(mask)])
    out = (*q[:-1], v[-1])
    track.outs(node, [out, *(track.fresh_dims(s, "statistics") for s in track.output_sizes(node)[1:])])


# --------------------------------------------------------------------------------------------------- factories


@rule(*_ops("zeros", "ones", "full", "empty", "rand", "randn", "scalar_tensor", "randint", "empty_strided"))
@rule(*_ops("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"))
def constant(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.factory_dims(shape(node), "factory"))


@rule(*_ops("arange", "linspace", "eye", "randperm", "tril_indices", "triu_indices", "logspace"))
def positions(track: Tracking, node: fx.Node) -> None:
    dims = track.factory_dims(shape(node), "position")
    for dim in dims:
        track.act(node, dim, "position")
    track.out(node, dims)


_SCALARS = _ops("sym_size", "sym_stride", "sym_numel", "_local_scalar_dense", "item")


@rule(*_SCALARS)
def number(track: Tracking, node: fx.Node) -> None:
    """A number read off a tensor: no dimensions."""
    track.scalar(node)


# ------------------------------------------------------------------------------------------- this package's ops

zeco = torch.ops.zeco


@rule(zeco.halo.default)
def halo(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(operand(node, 0)))
    dim, left, right = (track.number(argument(node, name)) for name in ("dim", "left", "right"))
    dims[dim] = track.padded(dims[dim], left, right, shape(node)[dim])
    track.out(node, tuple(dims))


@rule(zeco.all_sum.default, zeco.from_rank.default, zeco.all_max.default)
def same_everywhere(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.dims(operand(node, 0)))


@rule(zeco.at_rank.default)
def flag(track: Tracking, node: fx.Node) -> None:
    track.out(node, ((),))


_RULES[zeco.log_decay.default] = pointwise


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


@rule(zeco.recurrence_states.default)
def recurrence_states(track: Tracking, node: fx.Node) -> None:
    dims = track.broadcast([track.dims(operand(node, i)) for i in (0, 1)])
    state = track.dims(operand(node, 2))
    for own, other in zip(state, (dims[0], *dims[2:]), strict=True):
        track.unified(node, own, other)
    track.out(node, dims)


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
    k, v = track.dims(operand(node, 0)), track.dims(operand(node, 1))
    track.outs(node, [(k[0], k[2], k[3], v[3]), (k[0], k[2], ())])


# ---------------------------------------------------------------------------------------------------- the walk


def track_axes(
    graph: fx.Graph, along: Mapping[fx.Node, int | None], length: Size, facts: SizeFacts
) -> Tracking:
    """Axes of all nodes of a shadow graph. `along` names the dimension of each placeholder that runs along the
    sequence, None for those that do not; `length` is the number of rows of a rank's slice."""
    track = Tracking(length, facts)
    for node in graph.nodes:
        if node.op == "call_function":
            visit(track, node)
        elif node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                track.scalar(node)
                continue
            dims = [
                (track.axes.sequence,)
                if i == along.get(node)
                else track.axes.fresh(size, f"{node.op} {node.name}")
                for i, size in enumerate(shape(node))
            ]
            track.out(node, tuple(dims))
    return track


def track_region(whole: Tracking, given: Iterable[fx.Node], interior: Iterable[fx.Node]) -> Tracking | None:
    """Axes of a part of a graph, as if the values `given` to it had nothing to do with each other.

    In the whole graph two axes can be one for reasons outside of the part: q, k and v that are cut from one stacked
    projection have the same feature axis, though keys and values are different axes of an attention. None where a
    value does not run along the sequence as a whole.
    """
    track = Tracking(whole.axes.length, whole.axes.facts)
    named: set[fx.Node] = set()
    for node in given:
        own: dict[Atom, Atom] = {}
        # What it was made from is told by the same axes: a gate may be taken from before an exp and some views.
        current, steps = node, 0
        while current not in named and steps < _FEW:
            dims = _renamed(whole, track, current, own)
            if dims is None and current is node:
                return None
            if dims is None:
                break
            track.out(current, dims)
            named.add(current)
            sources = [
                n for n in tensors(current) if n.meta["val"].dtype is not torch.bool
            ]  # a mask beside it
            if len(sources) != 1:
                break
            current, steps = sources[0], steps + 1
    for node in interior:
        visit(track, node)
    return track


_FEW = 8


def _renamed(whole: Tracking, track: Tracking, node: fx.Node, own: dict[Atom, Atom]) -> Dims | None:
    """The dimensions of a value of `whole` in atoms of `track`; `own` holds the new atom of each old one."""
    rows = whole.axes.flat((whole.axes.sequence,))
    dims: list[Dim] = []
    for dim in whole.dims(node):
        flat = whole.axes.flat(dim)
        new: list[Atom] = []
        while flat:
            if flat[: len(rows)] == rows:
                new.append(track.axes.sequence)
                flat = flat[len(rows) :]
                continue
            atom = flat[0]
            if atom.sequence:
                return None
            if atom not in own:
                own[atom] = Atom(atom.size)
                own[atom].origins |= atom.origins
            new.append(own[atom])
            flat = flat[1:]
        dims.append(tuple(new))
    return tuple(dims)


def visit(track: Tracking, node: fx.Node) -> None:
    track.current = node
    if isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
        track.scalar(node)
        return
    track.mark_stepwise(node, any(track.stepwise(source) for source in node.all_input_nodes))
    rule_of_op = rule_for(node.target)
    if torch_private.checks_only(node):  # what it returns are tokens that keep it in its place
        track.outs(node, [()] * len(node.meta["val"]))
    elif rule_of_op is None:
        track.opaque(node, "an op without a rule")
    else:
        rule_of_op(track, node)
    selects = any(action.kind == "select" for action in track.acts_along_sequence(node))
    if selects or track.sequence_dims(node):
        track.mark_stepwise(node, not track.sequence_dims(node))
