"""Ops whose results depend on all places of a dimension: reductions, cumulative ops, norms, losses."""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.axes import Dims
from zeco_compile.passes.axis_rules.elementwise import pointwise
from zeco_compile.passes.axis_rules.registry import dim_list, ops, positive, rule
from zeco_compile.passes.schema import argument, operand, shape, tensors
from zeco_compile.passes.sizes import size_of
from zeco_compile.passes.tracking import Tracking

_REDUCTIONS = ops(
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
    which = dim_list(argument(node, "dim", argument(node, "axis")), len(dims))
    keepdim = bool(argument(node, "keepdim", False))
    for d in which:
        track.act(node, dims[d], "reduce")
    out = tuple(() if i in which else d for i, d in enumerate(dims) if keepdim or i not in which)
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, out)
    else:
        track.outs(node, [out] * len(node.meta["val"]))


@rule(*ops("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll"))
@rule(*ops("cummax", "cummin", "sort", "argsort"))
def along(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    which = dim_list(argument(node, "dim", argument(node, "dims", -1)), len(dims)) if dims else []
    for d in which:
        track.act(node, dims[d], "along")
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, dims)
    else:
        track.outs(node, [dims] * len(node.meta["val"]))


@rule(*ops("renorm"))
def renorm(track: Tracking, node: fx.Node) -> None:
    """What it is given as `dim` is the one dimension over which it takes no norm."""
    dims = track.dims(tensors(node)[0])
    kept = positive(argument(node, "dim"), len(dims))
    for i, dim in enumerate(dims):
        if i != kept:
            track.act(node, dim, "reduce")
    track.out(node, dims)


@rule(*ops("topk"))
def topk(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dim = positive(argument(node, "dim", -1), len(dims))
    track.act(node, dims[dim], "along")
    dims[dim] = track.axes.fresh(tuple(size_of(s) for s in node.meta["val"][0].shape)[dim], "topk")
    track.outs(node, [tuple(dims)] * 2)


@rule(*ops("tril", "triu"))
def triangle(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[-2:]:
        track.act(node, dim, "triangle")
    track.out(node, dims)


@rule(*ops("glu"))
def glu(track: Tracking, node: fx.Node) -> None:
    dims = list(track.dims(tensors(node)[0]))
    dim = positive(argument(node, "dim", -1), len(dims))
    track.act(node, dims[dim], "split")
    dims[dim] = track.axes.fresh(shape(node)[dim], "slice")
    track.out(node, tuple(dims))


@rule(*ops("histc"))
def histogram(track: Tracking, node: fx.Node) -> None:
    for dim in track.dims(operand(node, 0)):
        track.act(node, dim, "reduce")
    track.out(node, track.fresh_dims(shape(node), "bins"))


@rule(*ops("native_layer_norm", "_fused_rms_norm", "rms_norm"))
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


@rule(*ops("native_group_norm"))
def group_norm(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[1:]:
        track.act(node, dim, "reduce")
    statistics = (dims[0], track.axes.fresh(argument(node, "group"), "groups"))
    track.outs(node, [dims, statistics, statistics])


@rule(*ops("_native_batch_norm_legit", "native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm"))
@rule(
    *ops(
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


@rule(*ops("nll_loss_forward"))
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


@rule(*ops("nll_loss2d_forward"))
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
    *ops(
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
