"""The reports of this process, newest last: what `last_report` and `explain` hand out."""

from __future__ import annotations

from collections import deque

from zeco_compile.passes.report import Report

_MOST = 256
_reports: deque[Report] = deque(maxlen=_MOST)


def keep(report: Report) -> None:
    """Remembers the report of a graph that has been compiled."""
    _reports.append(report)


def last_report() -> Report | None:
    """The report of the graph that was compiled last in this process, None if there is none yet.

    A training step is one graph; a model with graph breaks has several: see `reports`.
    """
    return _reports[-1] if _reports else None


def reports() -> list[Report]:
    """The reports of all graphs compiled in this process, oldest first (the last 256)."""
    return list(_reports)
