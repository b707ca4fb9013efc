"""Whether a region is affine in an input by the ops on the way, whatever the numbers are.

Checks on random values show nothing of what happens beyond their range: a state that is reset where it is larger than
1e9, a gate that looks at the state's size. So every op between an input that is said to be written into the state, or
read from it, and the region's output has to be one of a few that are affine in their operands, or bilinear with the
input on one side only. An op that is not named here is none of them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis
from zeco_compile.passes.region import Region, is_inexact
from zeco_compile.passes.schema import argument, operand

_OF_FIRST = frozenset(
    {
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "clone",
        "alias", "detach", "select", "slice", "split", "split_with_sizes", "unbind", "chunk", "flip", "roll",
        "constant_pad_nd", "tril", "triu", "neg", "diagonal", "diag_embed", "unfold", "sum", "mean", "cumsum",
        "repeat", "movedim", "index", "index_select", "gather", "repeat_interleave", "real", "imag", "view_as_real",
        "view_as_complex", "conj", "_conj", "_conj_physical", "resolve_conj", "lift_fresh_copy", "contiguous",
        "flatten", "unflatten", "narrow", "broadcast_to", "squeeze_copy",
    }
)  # fmt: skip
"""Affine in the first operand; of the others (indices, sizes) it is no such function."""

_OF_ALL = frozenset(
    {
        "add", "sub", "rsub", "cat", "stack", "complex", "copy", "slice_scatter", "select_scatter",
        "diagonal_scatter",
    }
)  # fmt: skip
"""Affine in all operands together."""

_PRODUCTS = frozenset(["mul", "mm", "bmm", "matmul", "mv", "dot", "einsum", "linear", "outer"])
"""Linear in each operand."""

_SUMS_WITH_PRODUCTS = {
    "addcmul": ("self", ("tensor1", "tensor2")), "baddbmm": ("self", ("batch1", "batch2")),
    "addbmm": ("self", ("batch1", "batch2")), "addmm": ("self", ("mat1", "mat2")),
    "addmv": ("self", ("mat", "vec")),
}  # fmt: skip
"""A sum of the first and the product of the others."""

_CHOSEN_BY = {
    "where": ("condition",), "masked_fill": ("mask",), "index_put": ("indices",), "scatter": ("index",),
    "scatter_add": ("index",), "index_add": ("index",), "index_copy": ("index",), "masked_scatter": ("mask",),
    "div": ("other",), "_to_copy": (), "to": (), "addcdiv": ("tensor2",),
}  # fmt: skip
"""Affine in all operands together but those named, of which it is no such function."""

_CARRIES = (torch.ops.zeco.carry_before.default, torch.ops.zeco.carry_after.default)


def first_not_affine(
    region: Region, analysis: Analysis, given: fx.Node, *, powers: bool = False
) -> fx.Node | None:
    """The first op between the input `given` and the region's results that is not known to be affine in it; None if all
    are. With `powers` it may be multiplied with itself."""
    depending = {given}
    after = {each.before: each.after for each in region.carries}
    while True:
        count = len(depending)
        for node in region.interior:
            if node in region.inputs or node.target in SHAPED_LIKE:
                continue
            # of what is scanned, the other operand of a carry, it has the number of steps only
            carried = node.target is torch.ops.zeco.carry_before.default
            read = [operand(node, 0)] if carried else node.all_input_nodes
            found = node in depending or not depending.isdisjoint(read)
            found = found or (node in after and after[node] in depending)
            if not found or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
                continue
            if not is_affine_op(node, depending, powers=powers):
                return node
            depending.add(node)
        if len(depending) == count:
            return None


def is_affine_op(node: fx.Node, depending: set[fx.Node], *, powers: bool = False) -> bool:
    """Whether an op is affine in those of its operands that are `depending` on something. With `powers` they may be
    multiplied with each other."""
    target = node.target
    if target is operator.getitem or target in _CARRIES:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if isinstance(node.meta["val"], torch.Tensor) and not is_inexact(node):
        return False
    name = target._schema.name.removeprefix("aten::")

    def count(value: Any) -> int:
        return sum(isinstance(leaf, fx.Node) and leaf in depending for leaf in pytree.tree_leaves(value))

    everything = count((node.args, node.kwargs))
    if name in _OF_FIRST:
        return everything == count(node.args[0])
    if name in _OF_ALL:
        return not count(argument(node, "alpha"))
    if name in _PRODUCTS:
        return everything <= 1 or powers
    if name in _SUMS_WITH_PRODUCTS:
        first, factors = _SUMS_WITH_PRODUCTS[name]
        of_factors = sum(count(argument(node, each)) for each in factors)
        return everything == count(argument(node, first)) + of_factors and (of_factors <= 1 or powers)
    if name == "lerp":
        return powers or not (count(argument(node, "weight")) and everything > 1)
    if name in _CHOSEN_BY:
        rounded = name == "div" and argument(node, "rounding_mode") is not None
        return not rounded and not any(count(argument(node, each)) for each in _CHOSEN_BY[name])
    return False
