"""Ops that compute each element from those at the same place."""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.axis_rules.registry import ops, rule, rule_of_kind
from zeco_compile.passes.schema import shape, tensors
from zeco_compile.passes.tracking import Tracking


@rule(*ops("clone", "_to_copy", "detach", "alias", "lift_fresh_copy", "masked_fill", "copy", "where"))
@rule(*ops("rand_like", "randn_like", "bernoulli"))
@rule(*ops("native_dropout", "addcmul", "addcdiv", "lerp", "nan_to_num", "gelu", "silu", "logit", "hardtanh"))
@rule(*ops("softplus", "leaky_relu", "elu", "threshold", "log_sigmoid_forward", "view_of", "contiguous"))
@rule(*ops("prelu", "_prelu_kernel", "mish", "hardswish", "hardsigmoid", "celu", "glu_jvp", "fill", "pow"))
@rule(*ops("floor_divide", "rsub", "isclose"))
@rule(*ops("complex", "polar", "_conj", "_neg_view", "resolve_conj", "resolve_neg"))
@rule(*ops("bitwise_and", "bitwise_or", "logical_and", "logical_or", "logical_not", "isnan", "isfinite"))
@rule_of_kind(lambda target: torch.Tag.pointwise in getattr(target, "tags", ()))
def pointwise(track: Tracking, node: fx.Node) -> None:
    dims = track.broadcast([track.dims(n) for n in tensors(node)])
    if isinstance(node.meta["val"], torch.Tensor):
        track.out(node, dims)
    else:  # (result, mask or saved value); an empty saved value has no axes
        track.outs(node, [dims if len(s) == len(dims) else () for s in track.output_sizes(node)])


@rule(*ops("zeros_like", "ones_like", "full_like", "empty_like"))
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
