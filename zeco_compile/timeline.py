"""A picture of compute and All-Scan on each rank, from traces of ``torch.profiler``, and how much of the scan shows.

    python -m zeco_compile.timeline trace0.json trace1.json --out timeline.svg

One trace a rank, as ``profiler.export_chrome_trace`` writes it (``.json`` or ``.json.gz``). Writes the picture, and
beside it a JSON file with each rank's times; prints the same as a table.

    trace of     compute                             All-Scan                              exposed
    a GPU        kernels that are no communication   kernels whose name says so            All-Scan without compute
    the CPU      operators, but waiting for a scan   from ``zeco::scan_start`` until       ``zeco::scan_wait``
                                                     ``zeco::scan_wait`` returns

A trace with kernels is a GPU's. All-Scan kernels are NCCL's send and receive, and those whose name contains
"all_scan" or "scan_hop"; ``--scan REGEX`` says otherwise, for example where the model sends for other reasons. On the
CPU a scan runs in a thread that the profiler does not see: it is drawn for as long as it may have been in flight.

Ranks on several hosts are as far apart in the picture as the hosts' clocks are.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zeco_compile.errors import InvalidTrace

Interval = tuple[float, float]
"""(start, end) in microseconds"""

SCAN_KERNELS = r"ncclDevKernel_SendRecv|ncclKernel_SendRecv|all_scan|scan_hop"
_COMMUNICATION = re.compile(r"^nccl|^Memcpy PtoP")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class RankTimeline:
    """One rank's lanes, as disjoint intervals in order; ``device`` is "cuda" or "cpu"."""

    rank: int
    device: str
    compute: tuple[Interval, ...]
    scan: tuple[Interval, ...]
    exposed: tuple[Interval, ...]

    @property
    def span(self) -> Interval:
        lanes = (*self.compute, *self.scan)
        return min(start for start, _ in lanes), max(end for _, end in lanes)

    def to_dict(self) -> dict[str, Any]:
        """Times in microseconds; shares are 0 where there was no scan."""
        start, end = self.span
        scan, exposed = total(self.scan), total(self.exposed)
        return {
            "rank": self.rank,
            "device": self.device,
            "span_us": end - start,
            "compute_us": total(self.compute),
            "scan_us": scan,
            "exposed_us": exposed,
            "exposed_share_of_scan": exposed / scan if scan else 0.0,
            "exposed_share_of_span": exposed / (end - start) if end > start else 0.0,
        }


def read_trace(path: str | Path, position: int = 0, scan: str = SCAN_KERNELS) -> RankTimeline:
    """The lanes of one rank's trace; ``position`` is its rank where the trace does not say.

    Raises InvalidTrace, OSError.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = trace["traceEvents"]
        shift = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
        rank = int((trace.get("distributedInfo") or {}).get("rank", position))
    except (ValueError, KeyError, TypeError, AttributeError, gzip.BadGzipFile) as error:
        raise InvalidTrace(
            f"{path} is no trace of torch.profiler ({type(error).__name__}: {error}). Write it with "
            "`profiler.export_chrome_trace(path)`, one file a rank."
        ) from error
    return lanes(events, rank, shift, scan, str(path))


def lanes(
    events: Iterable[Mapping[str, Any]],
    rank: int,
    shift: float = 0.0,
    scan: str = SCAN_KERNELS,
    name: str = "the trace",
) -> RankTimeline:
    """The lanes of a trace's events (Chrome's format); ``shift`` microseconds are added. Raises InvalidTrace."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in complete if event.get("cat") in _ON_DEVICE]
    found = _of_kernels(kernels, rank, shift, scan) if kernels else _of_operators(complete, rank, shift)
    if not found.compute and not found.scan:
        raise InvalidTrace(
            f"there is neither a kernel nor an operator in {name}. Profile with activities that include CPU or CUDA, "
            "around a call of the model."
        )
    return found


def _of_kernels(kernels: Sequence[Mapping[str, Any]], rank: int, shift: float, pattern: str) -> RankTimeline:
    is_scan = re.compile(pattern)
    scans = union(_interval(event, shift) for event in kernels if is_scan.search(event["name"]))
    compute = union(
        _interval(event, shift)
        for event in kernels
        if not is_scan.search(event["name"]) and not _COMMUNICATION.search(event["name"])
    )
    return RankTimeline(rank, "cuda", compute, scans, without(scans, compute))


def _of_operators(events: Sequence[Mapping[str, Any]], rank: int, shift: float) -> RankTimeline:
    operators = sorted((event for event in events if event.get("cat") == "cpu_op"), key=lambda e: e["ts"])
    waits = [event for event in operators if event["name"] == "zeco::scan_wait"]
    started: dict[Any, list[float]] = defaultdict(list)
    scans = []
    # scans of one thread end in the order in which they began
    for event in operators:
        if event["name"] == "zeco::scan_start":
            started[event.get("tid")].append(_interval(event, shift)[0])
        elif event["name"] == "zeco::scan_wait":
            begun, end = started[event.get("tid")], _interval(event, shift)[1]
            scans.append((begun.pop(0) if begun else end - event["dur"], end))
    waiting = union(_interval(event, shift) for event in waits)
    compute = without(union(_interval(event, shift) for event in operators), waiting)
    return RankTimeline(rank, "cpu", compute, union(scans), waiting)


def _interval(event: Mapping[str, Any], shift: float) -> Interval:
    start = float(event["ts"]) + shift
    return start, start + float(event["dur"])


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same time as disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return tuple(out)


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> tuple[Interval, ...]:
    """What of ``intervals`` is not in ``taken``; both disjoint and in order."""
    out = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                out.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            out.append((start, end))
    return tuple(out)


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def summary(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Each rank's times, and the share of all ranks' scans that is exposed."""
    ranks = [each.to_dict() for each in timelines]
    scan, exposed = sum(row["scan_us"] for row in ranks), sum(row["exposed_us"] for row in ranks)
    return {"ranks": ranks, "exposed_share_of_scan": exposed / scan if scan else 0.0}


_COLOURS = {"compute": "#4c78a8", "scan": "#9ecae9", "exposed": "#e45756"}
_LEFT, _WIDTH, _LANE, _GAP, _TOP, _BOTTOM = 150, 1050, 20, 14, 44, 40


def draw(timelines: Sequence[RankTimeline], window: Interval | None = None) -> str:
    """An SVG picture: two lanes a rank, one under the other; ``window`` cuts it, in microseconds from the first event.

    Raises InvalidTrace where nothing is in the window.
    """
    origin = min(each.span[0] for each in timelines)
    whole = max(each.span[1] for each in timelines) - origin
    start, end = window or (0.0, whole)
    if not 0 <= start < min(end, whole):
        raise InvalidTrace(
            f"the window from {start:g} to {end:g} µs shows nothing: the traces last {whole:g} µs."
        )
    scale = _WIDTH / (end - start)
    height = _TOP + len(timelines) * (2 * _LANE + _GAP) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(),
    ]

    def bars(intervals: Iterable[Interval], kind: str, y: float) -> None:
        # what is nearer than half a pixel is one bar: a trace has many thousand operators
        drawn: list[Interval] = []
        for from_, to in intervals:
            left, right = (
                (max(from_ - origin, start) - start) * scale,
                (min(to - origin, end) - start) * scale,
            )
            if right <= left:
                continue
            if drawn and left - drawn[-1][1] < 0.5:
                drawn[-1] = (drawn[-1][0], right)
            else:
                drawn.append((left, right))
        parts.extend(
            f'<rect x="{_LEFT + left:.1f}" y="{y}" width="{max(right - left, 0.5):.1f}" height="{_LANE - 2}" '
            f'fill="{_COLOURS[kind]}"/>'
            for left, right in drawn
        )

    for number, each in enumerate(timelines):
        y = _TOP + number * (2 * _LANE + _GAP)
        share = each.to_dict()["exposed_share_of_scan"]
        for label, at in (
            (f"rank {each.rank}: compute", y),
            (f"All-Scan, {share:.0%} exposed", y + _LANE),
        ):
            parts.append(f'<text x="{_LEFT - 8}" y="{at + 13}" text-anchor="end">{html.escape(label)}</text>')
        bars(each.compute, "compute", y)
        bars(each.scan, "scan", y + _LANE)
        bars(each.exposed, "exposed", y + _LANE)
    parts += [*_axis(start, end, height - _BOTTOM + 4), "</svg>"]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    out = []
    names = {"compute": "compute", "scan": "All-Scan, covered", "exposed": "All-Scan, exposed"}
    for number, (kind, name) in enumerate(names.items()):
        x = _LEFT + number * 170
        out.append(f'<rect x="{x}" y="14" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 20}" y="26">{name}</text>')
    return out


def _axis(start: float, end: float, y: float) -> list[str]:
    """A line with ticks at round times, in milliseconds or microseconds."""
    unit, size = ("ms", 1e3) if end - start >= 2e3 else ("µs", 1.0)
    step = _round_step((end - start) / 8 / size)
    out = [f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="black"/>']
    tick = -(-(start / size) // step) * step
    while tick * size <= end:
        x = _LEFT + (tick * size - start) * _WIDTH / (end - start)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" stroke="black"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{tick:g} {unit}</text>')
        tick += step
    return out


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``least``."""
    power = 10.0 ** (len(f"{least:.0f}") - 1) if least >= 1 else 0.1
    while power > least:
        power /= 10
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m zeco_compile.timeline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("traces", nargs="+", type=Path, help="one trace of torch.profiler a rank")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"), help="the picture, an .svg file")
    parser.add_argument("--scan", default=SCAN_KERNELS, help="regular expression of the All-Scan's kernels")
    parser.add_argument(
        "--window", nargs=2, type=float, metavar=("FROM", "TO"), help="draw this part only, in milliseconds"
    )
    options = parser.parse_args(arguments)
    if options.out.suffix != ".svg":
        parser.error(f"the picture is SVG: --out {options.out} has to end in .svg")
    found = [read_trace(path, number, options.scan) for number, path in enumerate(options.traces)]
    found.sort(key=lambda each: each.rank)
    window = None if options.window is None else (options.window[0] * 1e3, options.window[1] * 1e3)
    result = summary(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(found, window))
    numbers = options.out.with_suffix(".json")
    numbers.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"{options.out}, {numbers}", title_justify="left")
    for column in ("rank", "on", "ms", "compute", "All-Scan", "exposed", "of the scan", "of all"):
        table.add_column(column, justify="right")
    for row in result["ranks"]:
        times = [f"{row[name] / 1e3:.3f}" for name in ("span_us", "compute_us", "scan_us", "exposed_us")]
        shares = [f"{row[f'exposed_share_of_{what}']:.1%}" for what in ("scan", "span")]
        table.add_row(str(row["rank"]), row["device"], *times, *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
