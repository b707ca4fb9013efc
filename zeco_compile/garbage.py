"""How often Python looks for garbage where graphs are compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, garbage is looked for after 50 000 new objects and not after 700; after it, as often as before.

    Traces make many objects that live, and to look through them again and again is a tenth of a compilation. Compiles
    do not run side by side (Dynamo has a lock), so nobody else's thresholds are put back.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collect_seldom() -> None:
    """The same for good, in a process that compiles all its life, once everything is imported: that is no garbage."""
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
