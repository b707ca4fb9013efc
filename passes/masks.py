"""Masks and decays that a model keeps in a buffer: data, not code, so they are looked at.

`register_buffer("mask", torch.tril(torch.ones(n, n)))` and `self.mask[:T, :T]` in the forward is how many models
write causality, and the decays of lightning attention and retention are tables too. The region that uses them can be
recognised only if the buffers' values are taken as they are. They are read when the graph is compiled, over all rows
that the sequence can use, and again whenever the buffer has changed since (`still_holds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.inputs import GraphInput


@dataclass(frozen=True)
class CausalMask:
    """The input `index` of the graph is constant on and below its diagonal, and constant above it."""

    index: int
    name: str
    rows: int
    below: float
    above: float

    def still_holds(self, value: torch.Tensor) -> bool:
        """The tensor is that mask. Reads the values: on a GPU this waits for it."""
        found = _triangle(value)
        return found is not None and found == (self.below, self.above)


_MOST_VALUES = 1 << 20


@dataclass(frozen=True, eq=False)
class TakenValues:
    """The input `index` of the graph has these values, on the CPU; `rows` is its largest size."""

    index: int
    name: str
    values: torch.Tensor

    @property
    def rows(self) -> int:
        return max(self.values.shape, default=1)

    def still_holds(self, value: torch.Tensor) -> bool:
        """The tensor has these values. Reads them: on a GPU this waits for it."""
        return value.shape == self.values.shape and bool(torch.equal(value.detach().cpu(), self.values))


Buffer = CausalMask | TakenValues
"""What a region relies on of a buffer."""


def taken_values(analysis: Analysis, node: fx.Node) -> TakenValues | None:
    """The values of a placeholder of the shadow graph, if it is a buffer of real numbers that has no gradient, is not
    too large, and is not written to by the model."""
    each = _buffer(analysis, node)
    if each is None or analysis.shadow.is_written_to(each.node):
        return None
    value = analysis.example_inputs[each.index]
    if not value.is_floating_point() or value.numel() > _MOST_VALUES:
        return None
    return TakenValues(each.index, each.name, value.detach().cpu().clone())


def _buffer(analysis: Analysis, node: fx.Node) -> GraphInput | None:
    """The input that a placeholder of the shadow graph is, if the model owns it and it has no gradient."""
    each = next((i for i in analysis.inputs if analysis.shadow.inputs.get(i.node) is node), None)
    if each is None or each.kind != "buffer" or each.along is not None:
        return None
    value = analysis.example_inputs[each.index]
    return each if isinstance(value, torch.Tensor) and not value.requires_grad else None


def causal_mask(analysis: Analysis, node: fx.Node) -> CausalMask | None:
    """The mask that a placeholder of the shadow graph holds, if the model owns it and it is a causal one."""
    each = _buffer(analysis, node)
    if each is None:
        return None
    value = analysis.example_inputs[each.index]
    found = _triangle(value)
    return None if found is None else CausalMask(each.index, each.name, int(value.shape[-1]), *found)


def _triangle(value: torch.Tensor) -> tuple[float, float] | None:
    """(value on and below the diagonal, value above it) of a square matrix with dimensions of one before it."""
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2:
        return None
    if value.numel() != value.shape[-1] ** 2 or value.is_complex():
        return None
    matrix = value.detach().reshape(value.shape[-2:])
    lower = torch.ones_like(matrix, dtype=torch.bool).tril()
    below, above = matrix[-1, 0], matrix[0, -1]
    if not bool((matrix == torch.where(lower, below, above)).all()):
        return None
    return float(below), float(above)
