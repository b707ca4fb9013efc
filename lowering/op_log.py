"""What ran, in the order in which it ran: each of our ops notes its name when it executes.

Compilers reorder; a test of the overlap has to look at what was executed, not at a graph. Off by default,
and then an op pays one test of a global.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_logs: list[list[str]] = []


def record(name: str) -> None:
    """Note that ``name`` runs now (called by the ops)."""
    if _logs:
        with _lock:
            for log in _logs:
                log.append(name)


@contextmanager
def recording() -> Iterator[list[str]]:
    """Collect the names of our ops that run in this process, in order, for as long as the context lasts.

    Ops appear as "rank_state", "scan_start", "scan_start reverse", "diagonal", "scan_wait", ...; a scan that
    a worker finishes in the background adds "scan done" or "scan reverse done" from the worker's thread.
    """
    log: list[str] = []
    with _lock:
        _logs.append(log)
    try:
        yield log
    finally:
        with _lock:
            # by identity: two recordings with the same content are equal lists
            _logs[:] = [other for other in _logs if other is not log]
