"""`torch._higher_order_ops.associative_scan`, as Dynamo traces it where several ranks share the sequence.

PyTorch unrolls it into a tree of slices, products and interleaved rows, from which the recurrence can hardly be read
(`combine_mode="generic"`), or keeps it as an operator that has no gradient for what its function closes over
("pointwise"). Its meaning is a scan in which the first token has none before it, which passes/scans.py reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zeco_compile.torch_private import scan


def associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """All prefixes of `xs` along `dim`, combined from the first on; with `reverse`, from the last on.

    It says what is computed, and is not made to be run: a scan is one step after the other.
    """
    leaves, spec = pytree.tree_flatten(xs)
    if combine_mode == "pointwise" and leaves[0].device.type == "cpu":
        raise ValueError("For combine_mode='pointwise', all input tensors need to be on CUDA or XPU")
    if reverse:
        leaves = [leaf.flip([dim]) for leaf in leaves]
    # PyTorch has no gradient for a scan of complex numbers, and it is not this scan that will be run.
    leaves = [torch.ops.zeco.scanned(leaf) if leaf.is_complex() else leaf for leaf in leaves]

    def step(carry: Any, now: Any) -> Any:
        started, before = carry
        combined = combine_fn(pytree.tree_unflatten(before, spec), pytree.tree_unflatten(now, spec))
        after = [
            torch.where(started > 0, made, first)
            for made, first in zip(pytree.tree_leaves(combined), now, strict=True)
        ]
        return (torch.ones_like(started), [each.clone() for each in after]), after

    # before the first token there is nothing; what stands there is not used
    nothing = [
        leaf.new_ones([size for i, size in enumerate(leaf.shape) if i != dim % leaf.dim()]) for leaf in leaves
    ]
    started = leaves[0].new_zeros(())  # PyTorch wants a gradient of whatever is carried
    started = started.abs() if started.is_complex() else started
    _, prefixes = scan(step, (started, nothing), leaves, dim=dim % leaves[0].dim())
    if reverse:
        prefixes = [each.flip([dim]) for each in prefixes]
    return pytree.tree_unflatten(list(prefixes), spec)
