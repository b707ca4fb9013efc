"""From a region to a and u of h_t = a_t h_{t-1} + u_t in complex numbers: LRU, S4D, S5.

Such a region ends with its states, [B, T, ...]. Which input is which is tried out: each is a factor of the decay a, a
factor of what is written u, or the state that it begins with, and a hypothesis counts only if the region equals the
recurrence in complex128 on random values, at all sizes, with decays of any size and zero among them. What is no such
recurrence (a conjugate, an absolute value or a real part in the update, features that are mixed) equals it for none.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.layout import (
    Canonical,
    CanonicalAxes,
    GraphOperations,
    arrange,
    canonical_value,
    disarrange,
    from_canonical_state,
    from_canonical_value,
)
from zeco_compile.passes.region import (
    CannotEvaluate,
    Region,
    Sizes,
    evaluate,
    final_state_value,
    is_inexact,
    piecewise,
    tolerance,
)
from zeco_compile.passes.report import Family
from zeco_compile.passes.roles import NotLinearAttention

aten = torch.ops.aten

_MOST_INPUTS = 5


@dataclass(frozen=True)
class ComplexRoles:
    """A hypothesis. Inputs are ATen nodes; a and u are products of those named, u times `scale`."""

    decays: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]
    initial_state: fx.Node | None
    axes: CanonicalAxes
    scale: float = 1.0

    @property
    def family(self) -> Family:
        return "complex"

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        initial = () if self.initial_state is None else (self.initial_state,)
        return (*self.decays, *self.written, *initial)

    @property
    def decay_layout(self) -> Canonical:
        """Decays that are the same at all positions have the layout of a state, one row for all of them."""
        along = self.axes.analysis.track.sequence_dims
        return Canonical.VALUE if any(map(along, self.decays)) else Canonical.STATE


def is_complex(region: Region) -> bool:
    """The region ends with complex numbers."""
    return bool(region.output.meta["val"].dtype.is_complex)


def find_complex_roles(
    region: Region, analysis: Analysis, sizes: Sequence[Sizes]
) -> tuple[ComplexRoles, float]:
    """The roles that pass, and the largest relative difference. Raises NotLinearAttention, CannotEvaluate."""
    for node in region.inputs:
        if not is_inexact(node):
            raise NotLinearAttention(f"it depends on {analysis.described(node)}, which holds no numbers")
    if len(region.inputs) > _MOST_INPUTS:
        raise NotLinearAttention("it computes complex numbers from more inputs than a recurrence has")
    trials = _Trials(region)
    for roles in _hypotheses(region, analysis):
        found = _checked(trials, roles, sizes)
        if found is not None:
            return found
    raise NotLinearAttention(
        "it computes with complex numbers, and is no recurrence h = a * h + u of each element by itself, whose states "
        "are what it gives: a conjugate, an absolute value or a real part of the state in the update, a product of "
        "the state with a matrix, or a read of the state before its update are not supported"
    )


def _hypotheses(region: Region, analysis: Analysis) -> Iterator[ComplexRoles]:
    axes = _axes(region, analysis)
    if axes is None or not all(
        axes.covers(Canonical.VALUE, n) and _has_each_axis_once(axes, n) for n in region.inputs
    ):
        return
    along = analysis.track.sequence_dims
    may_begin = bool(region.carries) or piecewise(region, analysis)
    choices = [("a", "u") if along(n) or not may_begin else ("a", "u", "h") for n in region.inputs]
    for roles in sorted(itertools.product(*choices), key=lambda each: each.count("a")):
        decays, written, initial = (
            tuple(n for n, role in zip(region.inputs, roles, strict=True) if role == which) for which in "auh"
        )
        if not decays or not any(map(along, written)) or len(initial) > 1:
            continue
        yield ComplexRoles(decays, written, initial[0] if initial else None, axes)


def _has_each_axis_once(axes: CanonicalAxes, node: fx.Node) -> bool:
    atoms = [atom for dim in axes.dims(node) for atom in dim]
    return len(set(atoms)) == len(atoms)


def _axes(region: Region, analysis: Analysis) -> CanonicalAxes | None:
    """[B, T, 1, V]: the output's first axis, the sequence, and all others as one."""
    track, output = analysis.track, region.output
    outer = [a for dim in track.dims(output) for a in track.axes.flat(dim) if not a.sequence]
    time = track.axes.flat((track.axes.sequence,))
    rows = time[0] if len(time) == 1 else Atom(track.axes.length, "rows", sequence=True)
    axes = CanonicalAxes(
        tuple(outer[:1]), time, (), (), tuple(outer[1:]), False, True, "complex", output, analysis, rows
    )
    return axes if _has_each_axis_once(axes, output) else None


# --------------------------------------------------------------------------------------------------- the check


class _Trials:
    """The region on random values, which are the same for all hypotheses that draw alike."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._made: dict[Any, tuple[dict[fx.Node, torch.Tensor], torch.Tensor]] = {}

    def at(
        self, roles: ComplexRoles, sizes: Sizes, seed: int, extreme: int
    ) -> tuple[dict[fx.Node, torch.Tensor], torch.Tensor]:
        decays = roles.decays if extreme else ()
        key = (sizes.length, frozenset(sizes.other.items()), seed, extreme, decays)
        if key not in self._made:
            values = _drawn(self.region, sizes, seed, decays, extreme)
            self._made[key] = values, evaluate(self.region, values, sizes)
        return self._made[key]


def _drawn(
    region: Region, sizes: Sizes, seed: int, decays: Sequence[fx.Node], extreme: int
) -> dict[fx.Node, torch.Tensor]:
    """Numbers of any phase or sign: at first such as a decay may be, whatever they are. In extreme draws decays are far
    smaller, or beyond one with zeros among them, and all else is large."""
    generator = torch.Generator().manual_seed(seed)

    def unit(node: fx.Node) -> torch.Tensor:
        return torch.rand(sizes.shape(node), generator=generator, dtype=torch.float64)

    values = {}
    for node in region.inputs:
        size = unit(node) * 0.6 + 0.37
        if extreme and node not in decays:
            size = size * 1e5
        elif extreme == 1:
            size = size**6
        elif extreme == 2:
            size = torch.where(unit(node) < 0.15, 0.0, size + 0.2)
        phase = unit(node)
        if node.meta["val"].dtype.is_complex:
            values[node] = torch.polar(size, phase * (2 * torch.pi))
        else:
            values[node] = torch.where(phase < 0.5, -size, size)
    return values


def _checked(
    trials: _Trials, roles: ComplexRoles, sizes: Sequence[Sizes]
) -> tuple[ComplexRoles, float] | None:
    worst, scale = 0.0, None
    draws = [(at, seed, 0) for seed, at in enumerate(sizes, start=11)]
    for at, seed, extreme in (*draws, (sizes[0], 7, 1), (sizes[0], 8, 2)):
        try:
            values, found = trials.at(roles, at, seed, extreme)
        except CannotEvaluate:
            return None
        h, _ = _recurrence(roles, values, at)
        expected = from_canonical_value(roles.axes, h, at)
        if not bool(torch.isfinite(found).all()) or not bool(torch.isfinite(expected).all()):
            return None
        if scale is None:
            scale = float((found * expected.conj()).sum().real / (expected * expected.conj()).sum().real)
            scale = float(f"{scale:.12g}")  # without the digits that are the check's rounding
            if scale == 0.0 or (scale != 1.0 and roles.initial_state is not None):
                return None
        difference = float((found - scale * expected).abs().max()) / max(float(found.abs().max()), 1e-300)
        if not difference <= tolerance(trials.region):
            return None
        worst = max(worst, difference)
    assert scale is not None, "there is a size at least"
    return replace(roles, scale=scale), worst


def _recurrence(
    roles: ComplexRoles, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """h [B, T, 1, V], and the state after the last step, [B, 1, 1, V], step by step."""
    axes = roles.axes
    u = canonical_value(axes, Canonical.VALUE, roles.written, values, sizes).to(torch.complex128)
    a = canonical_value(axes, roles.decay_layout, roles.decays, values, sizes).expand(u.shape)
    h = torch.zeros_like(u[:, :1])
    if roles.initial_state is not None:
        h = h + canonical_value(axes, Canonical.STATE, [roles.initial_state], values, sizes)
    rows = []
    for t in range(sizes.length):
        h = a[:, t : t + 1] * h + u[:, t : t + 1]
        rows.append(h)
    return torch.cat(rows, 1), h


_STEPS = 7


def final_complex_state_scale(region: Region, analysis: Analysis, roles: ComplexRoles) -> float | None:
    """What the region's final state is of the recurrence's, a constant; None if it is not that state."""
    state = region.final_state
    if state is None or not state.meta["val"].dtype.is_complex:
        return None
    if not (isinstance(analysis.length, int) or region.carries):
        return None
    length = analysis.length if isinstance(analysis.length, int) and not region.carries else _STEPS
    sizes = Sizes(analysis, length)
    for seed in (21, 22):
        values = _drawn(region, sizes, seed, (), 0)
        found = final_state_value(region, values, sizes)
        expected = from_canonical_state(roles.axes, _recurrence(roles, values, sizes)[1], state, sizes)
        if expected is None or expected.shape != found.shape:
            return None
        difference = (found - roles.scale * expected).abs().max()
        if not float(difference) <= tolerance(region) * float(found.abs().max()):
            return None
    return roles.scale


# -------------------------------------------------------------------------------------------------- the rewrite


def emit_recurrence(
    ops: GraphOperations,
    roles: ComplexRoles,
    values: Mapping[fx.Node, fx.Node],
    final_state: bool,
    wiring: tuple[str, int, str],
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(the operator, the region's output, the state after the last step in the operator's layout) at the graph's
    insertion point; `wiring` are the schedule, the blocks and the group."""
    axes = roles.axes
    dtype = axes.output.meta["val"].dtype

    def of(kind: Canonical, nodes: Sequence[fx.Node]) -> fx.Node:
        return ops.call(aten.to.dtype, arrange(ops, axes, kind, nodes, values), dtype)

    a, u = of(roles.decay_layout, roles.decays), of(Canonical.VALUE, roles.written)
    initial = None
    if roles.initial_state is not None:
        initial = ops.squeeze(of(Canonical.STATE, [roles.initial_state]), 1)
    call = ops.call(torch.ops.zeco.complex_recurrence.default, a, u, initial, final_state, *wiring)
    h, last = (ops.call(operator.getitem, call, i) for i in (0, 1))
    if roles.scale != 1.0:
        h = ops.call(aten.mul.Tensor, h, roles.scale)
    return call, disarrange(ops, axes, h), ops.unsqueeze(last, 1) if final_state else last
