"""What the rows of an attention are divided by, where that is how many positions they see, or the sum of their decays.

`scores / torch.arange(1, T + 1)[:, None]` makes a mean of a sum, and RetNet divides the rows of its decay matrix D by
`D.sum(-1, keepdim=True).sqrt()`. Both are powers of one number of each position, the sum of the decays that it sees:

    n_t = 1 + a + a^2 + ... + a^t = (1 - a^(t+1)) / (1 - a),   and t + 1 without a decay.

So the recurrence with its rows multiplied by a power of n_t is tried where that without does not fit, and the operator
is followed by the same product, at the positions of the whole sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.layout import GraphOperations

aten = torch.ops.aten

_POWERS = (-1.0, -0.5, 0.5, 1.0)


@dataclass(frozen=True)
class RowFactor:
    """`n_t ** power`; `log_decays` has log a of each head, and is empty where n_t is t + 1."""

    power: float
    log_decays: tuple[float, ...] = ()

    def __str__(self) -> str:
        what = "sum of the decays that it sees" if self.log_decays else "number of positions that it sees"
        return f"the {what}, to the power of {self.power:g}"

    def values(self, length: int) -> torch.Tensor:
        """[T, heads], or [T, 1]; float64."""
        count = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
        if self.log_decays:
            g = torch.tensor(self.log_decays, dtype=torch.float64)
            count = torch.expm1(count * g) / torch.expm1(g)
        return count**self.power

    def emit(
        self, ops: GraphOperations, o: fx.Node, rows: Any, g: fx.Node | None, dtype: torch.dtype
    ) -> fx.Node:
        """`o`, [B, T, H, V] in the user's graph, times the factor; `g` has the log decay of each head."""
        device = ops.call(getattr, o, "device")
        position = ops.call(torch.arange, rows, device=device)
        count = ops.call(aten.to.dtype, ops.call(aten.add.Tensor, position, 1), dtype)
        count = ops.unsqueeze(count, 1)
        if self.log_decays and g is not None:
            count = ops.call(
                torch.div, ops.call(torch.expm1, ops.multiply(count, g)), ops.call(torch.expm1, g)
            )
        factor = ops.unsqueeze(ops.unsqueeze(ops.call(torch.pow, count, self.power), 2), 0)
        return ops.multiply(o, factor)


def fit(scales: torch.Tensor, log_decays: Sequence[float] | None, allowed: float) -> RowFactor | None:
    """The factor that `scales` [T, heads] are, up to a constant. None if they are no such factor."""
    if scales.shape[0] < _FEWEST_ROWS or not bool(torch.isfinite(scales).all()) or bool((scales == 0).any()):
        return None
    bases: list[tuple[float, ...]] = [()]
    if log_decays is not None and all(g < 0 for g in log_decays):
        bases.insert(0, tuple(log_decays))
    for base, power in itertools.product(bases, _POWERS):
        factor = RowFactor(power, base)
        left = scales / factor.values(scales.shape[0])
        if bool(((left / left[:1, :1] - 1).abs() <= math.sqrt(allowed)).all()):
            return factor
    return None


_FEWEST_ROWS = 4
