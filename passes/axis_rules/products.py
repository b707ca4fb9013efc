"""Matrix products, convolutions, and softmax attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zeco_compile.passes.axes import Dims
from zeco_compile.passes.axis_rules.registry import ops, rule, rule_of_kind
from zeco_compile.passes.schema import argument, operand, shape, tensors
from zeco_compile.passes.tracking import Tracking


def _contract(track: Tracking, node: fx.Node, a: Dims, b: Dims) -> Dims:
    """[..., m, k] x [..., k, n] with equal batch dimensions."""
    inner = track.unified(node, a[-1], b[-2])
    track.act(node, inner, "contract")
    batch = track.broadcast([a[:-2], b[:-2]])
    return (*batch, a[-2], b[-1])


@rule(*ops("mm", "bmm", "matmul"))
def product(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.out(node, _contract(track, node, a, b))


@rule(*ops("addmm", "baddbmm"))
def added_product(track: Tracking, node: fx.Node) -> None:
    bias, a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1), operand(node, 2)))
    track.out(node, track.broadcast([_contract(track, node, a, b), bias]))


@rule(*ops("_cdist_forward"))
def distances(track: Tracking, node: fx.Node) -> None:
    """Of each row of one to each row of the other."""
    a, b = (track.dims(operand(node, i)) for i in (0, 1))
    batch = track.broadcast([a[:-2], b[:-2]])
    track.act(node, track.unified(node, a[-1], b[-1]), "contract")
    track.out(node, (*batch, a[-2], b[-2]))


@rule(*ops("linalg_inv_ex", "linalg_cholesky_ex"))
def of_matrices(track: Tracking, node: fx.Node) -> None:
    dims = track.dims(tensors(node)[0])
    for dim in dims[-2:]:
        track.act(node, dim, "along")
    track.outs(node, [dims, dims[:-2]])


@rule(*ops("mv"))
def matrix_vector(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.out(node, _contract(track, node, a, (*b, ()))[:-1])


@rule(*ops("dot", "vdot"))
def dot(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    track.act(node, track.unified(node, a[0], b[0]), "contract")
    track.out(node, ())


_GROUPED_PRODUCTS = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
"""By name: a library's ops are there when it has been imported."""


def is_grouped_product(target: Any) -> bool:
    """An op that multiplies rows [S, K] with the weights [E, K, N] of their group; `offs` [E] says where groups end."""
    return isinstance(target, torch._ops.OpOverload) and target.name().split(".")[0] in _GROUPED_PRODUCTS


@rule_of_kind(is_grouped_product)
def grouped_product(track: Tracking, node: fx.Node) -> None:
    a, b = (track.dims(n) for n in (operand(node, 0), operand(node, 1)))
    if (len(a), len(b)) != (2, 3) or not isinstance(argument(node, "offs"), fx.Node):
        track.opaque(node, "groups of what is contracted")
        return
    track.act(node, track.unified(node, a[1], b[1]), "contract")
    track.act(node, a[0], "group")  # which weights a row gets depends on its place
    track.act(node, b[0], "look-up")
    track.out(node, (a[0], b[2]))


@rule(*ops("convolution", "_convolution"))
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


@rule(
    *ops(
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
    for dim in (k[-2], v[-2], q[-1], k[-1]):
        track.act(node, dim, "attend")
    if argument(node, "is_causal", False) or any(track.axes.is_sequence(dim) for dim in (k[-2], v[-2])):
        track.act(node, q[-2], "attend")  # else each query sees the same keys, whatever its place
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    mask = next((argument(node, name) for name in ("attn_mask", "attn_bias") if name in names), None)
    if isinstance(mask, fx.Node):
        track.broadcast([(*q[:-1], k[-2]), track.dims(mask)])
    out = (*q[:-1], v[-1])
    track.outs(node, [out, *(track.fresh_dims(s, "statistics") for s in track.output_sizes(node)[1:])])
