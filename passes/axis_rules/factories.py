"""Ops that make tensors from sizes, and numbers that are read off tensors."""

from __future__ import annotations

from torch import fx

from zeco_compile.passes.axis_rules.registry import ops, rule
from zeco_compile.passes.schema import shape
from zeco_compile.passes.tracking import Tracking


@rule(*ops("zeros", "ones", "full", "empty", "rand", "randn", "scalar_tensor", "randint", "empty_strided"))
@rule(*ops("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"))
def constant(track: Tracking, node: fx.Node) -> None:
    track.out(node, track.factory_dims(shape(node), "factory"))


@rule(*ops("arange", "linspace", "eye", "randperm", "tril_indices", "triu_indices", "logspace"))
def positions(track: Tracking, node: fx.Node) -> None:
    dims = track.factory_dims(shape(node), "position")
    for dim in dims:
        track.act(node, dim, "position")
    track.out(node, dims)


_SCALARS = ops("sym_size", "sym_stride", "sym_numel", "_local_scalar_dense", "item")


@rule(*_SCALARS)
def number(track: Tracking, node: fx.Node) -> None:
    """A number read off a tensor: no dimensions."""
    track.scalar(node)
