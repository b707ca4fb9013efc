"""How far one tensor is from another, and whether that is near enough.

Two numbers per pair, both relative: the norm of the difference over the norm of the reference, and the
worst single element over the reference's largest element. The first alone would let one wrong row of a long
tensor pass. A NaN passes only where the reference has one too, an infinity only where the same one stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# What eager itself leaves in a gradient that is zero in exact arithmetic (a bias before a normalisation,
# say), as a fraction of the largest gradient's root mean square. Only tensors smaller than that profit
# from it.
_ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-7, torch.bfloat16: 1e-3, torch.float16: 2e-4}

_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def default_rtol(dtype: torch.dtype | None) -> float:
    """The tolerance of a comparison in this dtype when the caller names none (float32's for ``None``)."""
    return _RTOL.get(dtype or torch.float32, _RTOL[torch.float32])


def rounding_floor(dtype: torch.dtype | None, scale: float) -> float:
    """The root-mean-square error below which a difference is rounding, for tensors of this scale."""
    return _ROUNDING.get(dtype or torch.float32, _ROUNDING[torch.float32]) * scale


@dataclass(frozen=True)
class Difference:
    """One tensor of the compiled run against its reference.

    ``kind`` is "output", "input gradient", "parameter gradient" or "buffer"; ``where`` says on which rank, or
    that it is the sum over ranks. ``fault`` is set when the two cannot be compared by size at all.
    """

    kind: str
    name: str
    where: str
    relative: float
    elementwise: float
    rtol: float
    passed: bool
    fault: str | None = None

    def __str__(self) -> str:
        head = f"{self.kind} {self.name!r}, {self.where}: "
        if self.fault is not None:
            return head + self.fault
        return head + (
            f"relative error {self.relative:.3g}, worst element {self.elementwise:.3g} of the largest value"
            f" (allowed: {self.rtol:.3g})"
        )


def fault(kind: str, name: str, where: str, what: str, rtol: float) -> Difference:
    """A difference that is not a matter of degree: a missing tensor, a wrong shape, a wrong dtype."""
    return Difference(kind, name, where, math.inf, math.inf, rtol, passed=False, fault=what)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def rms(x: Tensor) -> float:
    """Root mean square over the finite elements, in float64; 0 for an empty tensor."""
    wide = _wide(x)
    wide = wide[torch.isfinite(wide)]
    return float(wide.abs().square().mean().sqrt()) if wide.numel() else 0.0


def compare(
    got: Tensor, want: Tensor, *, kind: str, name: str, where: str, rtol: float, floor: float = 0.0
) -> Difference:
    """``got`` against ``want``: same shape, same non-finite elements, and near enough in both measures.

    Near enough: root mean square of the difference at most ``max(rtol * rms(want), floor)``, and the worst
    element at most ``max(rtol * max|want|, 8 * floor)``. Integers and booleans must be equal.
    """
    if got.shape != want.shape:
        return fault(kind, name, where, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", rtol)
    if not (want.is_floating_point() or want.is_complex()):
        wrong = int((got != want).sum())
        if wrong:
            return fault(kind, name, where, f"{wrong} of {want.numel()} elements differ (exact dtype)", rtol)
        return Difference(kind, name, where, 0.0, 0.0, rtol, passed=True)

    a, b = _wide(got), _wide(want)
    finite = torch.isfinite(b)
    same = torch.where(finite, torch.isfinite(a), (a == b) | (torch.isnan(a) & torch.isnan(b)))
    if not bool(same.all()):
        first = tuple(int(i) for i in (~same).nonzero()[0])
        what = (
            f"{int((~same).sum())} of {b.numel()} elements differ in being NaN or infinite;"
            f" at {list(first)} got {got[first].item()}, expected {want[first].item()}"
        )
        return fault(kind, name, where, what, rtol)

    a, b = a[finite], b[finite]
    if b.numel() == 0:
        return Difference(kind, name, where, 0.0, 0.0, rtol, passed=True)
    error, size = (a - b).abs(), b.abs()
    error_rms, size_rms = float(error.square().mean().sqrt()), float(size.square().mean().sqrt())
    error_max, size_max = float(error.max()), float(size.max())
    passed = error_rms <= max(rtol * size_rms, floor) and error_max <= max(rtol * size_max, 8 * floor)
    return Difference(
        kind, name, where, _ratio(error_rms, size_rms), _ratio(error_max, size_max), rtol, passed=passed
    )


def _ratio(error: float, size: float) -> float:
    if size:
        return error / size
    return math.inf if error else 0.0
