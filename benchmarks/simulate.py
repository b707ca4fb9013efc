"""A discrete-event simulation of sequence parallelism on 2 to 4096 ranks: scans, and whole training steps.

    python benchmarks/simulate.py --out FOLDER [--ranks-per-host 8] [--quick]
    python benchmarks/simulate.py --out FOLDER --plot simulation.json       draws again

Prints tables, and writes FOLDER/simulation.json and FOLDER/simulation_*.png (``pip install zeco_compile[bench]``).

What is simulated: every rank has a compute stream and ports to the others, see simulated_scans.py and
simulated_steps.py. What is not: contention inside of the network, jitter between ranks, what a message costs the
kernels beside it.

Where the numbers are from stands in :data:`INPUTS`, and goes into the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paper_model import DECAY, HEADS, PAPER_ALONE, PAPER_AT_256, PAPER_SCAN_MS, STATE, VALUE
from rich.console import Console
from rich.table import Table
from simulated_scans import Machine, scan
from simulated_steps import RESULTS, layers, step
from simulation_pictures import draw

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCosts

MIB = 1 << 20

INPUTS = {
    "links inside of a host": cost_model.DEFAULTS["symmetric"].intra.source,
    "links between hosts": cost_model.DEFAULTS["symmetric"].inter.source,
    "scans to compare with": "benchmarks/results/collectives_2xh200.json, symmetric memory, CUDA graph, two H200s",
    "operator": "benchmarks/results/gla_operator_h200.json, CUDA graph, H200",
    "rest of the model": "16k tokens at the paper's 42838 tokens/s/GPU (data parallel), less 20 operators of 6.55 ms; "
    "per token the same at every length",
    "parts of the operator": "assumed: 30 % before the scan starts, 30 % beside it, 40 % after it, either direction",
}

METHODS = ("none", *cost_model.SCHEDULES, "all-gather of k and v", "all-to-all")


def measured_scans() -> list[dict[str, Any]]:
    """What benchmarks/collectives.py found for the chain through symmetric memory: "ranks", "bytes", "us"."""
    rows = json.loads((RESULTS / "collectives_2xh200.json").read_text())["rows"]
    return [row for row in rows if row["way"] == "all_scan, symmetric memory" and row["how"] == "graph"]


def checks() -> list[dict[str, Any]]:
    """Measured chains beside the simulated ones."""
    found = []
    for row in measured_scans():
        ranks, measured = row["ranks"], row["us"]
        simulated = max(scan("all_scan", Machine.of(ranks, ranks), state=row["bytes"])) * 1e6
        found.append(
            {
                "ranks": ranks,
                "bytes": row["bytes"],
                "measured_us": measured,
                "simulated_us": simulated,
                "error": simulated / measured - 1,
            }
        )
    return found


def scan_times(sizes: Sequence[int], per_host: int) -> dict[str, dict[int, float]]:
    """Seconds until the last rank has its state, by schedule and number of ranks."""
    return {
        schedule: {ranks: max(scan(schedule, Machine.of(ranks, per_host))) for ranks in sizes}
        for schedule in cost_model.SCHEDULES
    }


def crossings(times: dict[str, dict[int, float]]) -> dict[str, int | None]:
    """From how many ranks on tree and two-level beat the chain, and two-level the tree, for good."""

    def first(faster: str, slower: str) -> int | None:
        found = None
        for ranks in sorted(times[faster], reverse=True):
            if times[faster][ranks] >= times[slower][ranks]:
                break
            found = ranks
        return found

    pairs = (("all_scan_tree", "all_scan"), ("two_level", "all_scan"), ("two_level", "all_scan_tree"))
    return {f"{faster} before {slower}": first(faster, slower) for faster, slower in pairs}


def throughput(
    sizes: Sequence[int], tokens: int, operator: str, per_host: int
) -> dict[str, dict[int, float]]:
    """Tokens a second and rank, by method and number of ranks. Ulysses has a head for each rank at least."""
    forward, backward = layers(tokens, operator)
    out: dict[str, dict[int, float]] = {}
    for method in METHODS:
        out[method] = {
            ranks: tokens / step(method, Machine.of(ranks, per_host), forward, backward, tokens)
            for ranks in sizes
            if method != "all-to-all" or ranks <= HEADS
        }
    return out


def headline(per_host: int) -> list[dict[str, Any]]:
    """The paper's claim: 1M tokens on 64 ranks in about the time of 16k on one, 8M on 256 in that of 32k."""
    out = []
    for ranks, tokens in ((64, 16384), (256, 32768)):
        for operator in ("paper", "h200"):
            forward, backward = layers(tokens, operator)
            alone = step("none", Machine.of(1), forward, backward, tokens)
            for schedule in ("all_scan", "two_level", "lasp2"):
                seconds = step(schedule, Machine.of(ranks, per_host), forward, backward, tokens)
                out.append(
                    {
                        "ranks": ranks,
                        "tokens": ranks * tokens,
                        "operator": operator,
                        "schedule": schedule,
                        "seconds": seconds,
                        "seconds_of_one_rank": alone,
                        "ratio": seconds / alone,
                    }
                )
    return out


def sweeps(per_host: int) -> dict[str, Any]:
    """Scan times over blocks, state sizes and link speeds at 64 ranks; share of a step over tokens per rank."""
    machine = Machine.of(64, per_host)
    default = machine.costs
    as_long = LinkCosts(
        replace(default.intra, gap=default.intra.latency), replace(default.inter, gap=default.inter.latency)
    )
    gaps = {"no gap": default, "gap as long as the latency": as_long}
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    sizes = tuple(MIB * 4**power // 16 for power in range(7))
    speeds = (25, 50, 100, 200, 400, 900)  # GB/s
    picked = ("all_scan", "all_scan_tree", "two_level", "lasp2")

    def inter(gigabytes: float) -> Machine:
        return Machine.of(
            64, per_host, replace(default, inter=replace(default.inter, per_byte=1e-9 / gigabytes))
        )

    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    return {
        "blocks": {
            f"{schedule}, {name}": {
                n: max(scan(schedule, Machine.of(64, per_host, costs), blocks=n)) for n in counts
            }
            for schedule in ("all_scan", "two_level")
            for name, costs in gaps.items()
        },
        "state bytes": {
            schedule: {size: max(scan(schedule, machine, state=size, decay=size / VALUE)) for size in sizes}
            for schedule in picked
        },
        "GB/s between hosts": {
            schedule: {speed: max(scan(schedule, inter(speed))) for speed in speeds} for schedule in picked
        },
        "tokens per rank": {
            schedule: {
                tokens: step(schedule, machine, *layers(tokens, "h200"), tokens)
                / step("none", Machine.of(1), *layers(tokens, "h200"), tokens)
                for tokens in lengths
            }
            for schedule in picked
        },
    }


def simulate(per_host: int, quick: bool) -> dict[str, Any]:
    """All results, ready for ``json.dumps``."""
    most = 6 if quick else 12
    scans = scan_times([1 << power for power in range(1, most + 1)], per_host)
    sizes = [1 << power for power in range(1, 5 if quick else 10)]
    costs = Machine.of(2).costs
    return {
        "inputs": INPUTS,
        "links": asdict(costs),
        "ranks per host": per_host,
        "state bytes": STATE,
        "decay bytes": DECAY,
        "checks": checks(),
        "scan seconds": scans,
        "crossings": crossings(scans),
        "tokens/s/rank": {
            f"{tokens} tokens, operator {operator}": throughput(sizes, tokens, operator, per_host)
            for tokens in (16384, 32768)
            for operator in ("paper", "h200")
        },
        "headline": headline(per_host),
        "sweeps at 64 ranks": sweeps(per_host),
        "paper": {
            "tokens/s/GPU alone": PAPER_ALONE,
            "tokens/s/GPU at 256": PAPER_AT_256,
            "all-scan milliseconds": PAPER_SCAN_MS,
        },
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="chains, measured and simulated", title_justify="left")
    for column in ("ranks", "KiB", "measured µs", "simulated µs", "error"):
        table.add_column(column, justify="right")
    for row in results["checks"]:
        times = [f"{row[f'{how}_us']:.1f}" for how in ("measured", "simulated")]
        table.add_row(str(row["ranks"]), str(row["bytes"] >> 10), *times, f"{row['error']:+.0%}")
    console.print(table)
    _show_by_ranks(results["scan seconds"], "scan alone, µs", 1e6, console)
    console.print({key: value or "not up to here" for key, value in results["crossings"].items()})
    for name, values in results["tokens/s/rank"].items():
        _show_by_ranks(values, f"tokens/s/rank, {name}", 1.0, console)
    table = Table(title="long sequences beside one rank's share alone", title_justify="left")
    for column in ("ranks", "tokens", "operator", "schedule", "seconds", "one rank", "ratio"):
        table.add_column(column, justify="right")
    for row in results["headline"]:
        table.add_row(
            str(row["ranks"]),
            f"{row['tokens'] / MIB:g} Mi",
            row["operator"],
            row["schedule"],
            f"{row['seconds']:.4f}",
            f"{row['seconds_of_one_rank']:.4f}",
            f"{row['ratio']:.4f}",
        )
    console.print(table)


def _show_by_ranks(values: dict[str, dict[int, float]], title: str, factor: float, console: Console) -> None:
    sizes = sorted({ranks for times in values.values() for ranks in times})
    table = Table(title=title, title_justify="left")
    for column in ("ranks", *values):
        table.add_column(column, justify="right")
    for ranks in sizes:
        cells = [f"{times[ranks] * factor:,.0f}" if ranks in times else "" for times in values.values()]
        table.add_row(str(ranks), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/simulation"), help="folder for results")
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="up to 64 ranks, no pictures")
    parser.add_argument("--plot", type=Path, help="draw from this simulation.json, simulate nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.plot is not None:
        print(*draw(json.loads(options.plot.read_text()), options.out), sep="\n")
        return
    results = simulate(options.ranks_per_host, options.quick)
    show(results, Console(width=150))
    path = options.out / "simulation.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(path)
    if not options.quick:
        print(*draw(results, options.out), sep="\n")


if __name__ == "__main__":
    main()
