"""What a scan carries from step to step, written for all steps at once: for analysis only.

`passes/scans.py` writes the body of a scan out for all steps. What the steps read of the carry is then one value with
a row for each step, and so is what they leave behind; row t of the first is row t - 1 of the second, which no graph
can say. Two operators stand for it. They are in a graph only between passes.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zeco_compile.lowering.registry import LIBRARY, LOCAL_TAGS, define


def _before(initial: Tensor, steps: Tensor) -> Tensor:
    """[T, *initial]: the carry before each step, for `steps` [T, ...]. Computed, it is right for one step only."""
    return initial.unsqueeze(0).expand(steps.shape[0], *initial.shape).clone()


def _after(before: Tensor, value: Tensor) -> Tensor:
    """`value` [T, *carry]: what the steps make of `before`."""
    return value.clone()


LIBRARY.define("scanned(Tensor x) -> Tensor")
LIBRARY.impl("scanned", torch.Tensor.detach, "CompositeImplicitAutograd")
"""`x` as Dynamo sees it enter a scan: without its gradient. The rewrite puts `x` itself in its place first of all."""

define("carry_before(Tensor initial, Tensor steps) -> Tensor", _before, _before, LOCAL_TAGS)
define("carry_after(Tensor before, Tensor value) -> Tensor", _after, _after, LOCAL_TAGS)

fx.node.has_side_effect(torch.ops.zeco.carry_after.default)
"""Also where nobody reads the carry any more, as a step that reads it before it writes, it says what a step does."""
