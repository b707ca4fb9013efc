"""Calls at the end of a piece of the memory for frames map no new one each."""

from __future__ import annotations

import resource
import sys

import pytest

from zeco_compile.frames import roomy

CALLS = 200


def nothing() -> None:
    pass


def calls_at(depth: int) -> None:
    """Many calls, one after the other, below so many others."""
    if depth:
        calls_at(depth - 1)
    else:
        for _ in range(CALLS):
            nothing()


def faults() -> int:
    """How often memory had to be mapped anew, at all depths up to one that goes through several pieces."""
    calls_at(400)  # what a first time takes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for depth in range(400):
        calls_at(depth)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_results_and_errors_come_through() -> None:
    def divide(a: float, *, by: float) -> float:
        """A quotient."""
        return a / by

    assert roomy(divide)(3.0, by=2.0) == 1.5
    assert roomy(divide).__doc__ == "A quotient."
    with pytest.raises(ZeroDivisionError):
        roomy(divide)(3.0, by=0.0)


def test_calls_map_no_memory() -> None:
    assert roomy(faults)() < CALLS, "all depths have the room that was mapped once"
    if (3, 11) <= sys.version_info < (3, 14):
        assert faults() > CALLS, "Python does not do any more what this is for"
