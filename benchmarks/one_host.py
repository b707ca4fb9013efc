"""All that is measured between ranks, on the GPUs of one host, beside its targets and what the simulation says of it.

    python benchmarks/one_host.py --out out/one_host [--ranks 4 8]
    python benchmarks/one_host.py --out out/one_host --summary      from the results that are there already

For each number of ranks (by default all GPUs) it runs collectives.py, sharded_operator.py and gla_model.py under
torchrun, one after the other, each under a limit of time; what one of them prints goes into a file beside its results.
Writes FOLDER/summary.json and summary.md, a line for each target. About five minutes for a number of ranks, most of
which the 1B model takes to compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulate import MIB
from simulated_scans import Machine, scan
from simulated_steps import layers, step

FOLDER = Path(__file__).parent
TOKENS = 16384

# A hop's microseconds, and how far off the line through all hops may be.
HOP_US, SLACK = 2.0, 1.5
MOST_OVERHEAD, LEAST_OF_DATA_PARALLEL = 0.03, 0.97

RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "collectives": (150, ("--rounds", "9")),
    "sharded_operator": (150, ("--rounds", "11", "--schedules", "all_scan", "all_scan_tree", "lasp2")),
    "gla_model": (280, ("--rounds", "5", "--schedules", "data parallel", "all_scan")),
}
"""Seconds at most, and how each benchmark is called."""


@dataclass(frozen=True)
class Line:
    """One target: ``measured`` has to be at most ``target`` (``at_least``: not less), in ``unit``."""

    ranks: int
    what: str
    unit: str
    measured: float
    target: float
    simulated: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def run(ranks: int, folder: Path) -> None:
    """Every benchmark with that many ranks. Raises CalledProcessError or TimeoutExpired, which say which one failed,
    and leaves what it printed in ``FOLDER/NAME/log.txt``."""
    begin = time.perf_counter()
    for name, (limit, options) in RUNS.items():
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        print(f"{time.perf_counter() - begin:5.0f} s  {ranks} ranks: {name}, up to {limit} s", flush=True)
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [*launch, str(FOLDER / f"{name}.py"), "--out", str(out), *options]
        with (out / "log.txt").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=True)


def scan_lines(ranks: int, rows: Sequence[dict[str, Any]]) -> list[Line]:
    """All-Scan in a CUDA graph, 1 and 4 MiB: a hop for each rank but one, and the state once over the wire."""
    machine = Machine.of(ranks, ranks)
    lines = []
    for row in rows:
        if (row["way"], row["how"], row["ranks"]) != ("all_scan, symmetric memory", "graph", ranks):
            continue
        if row["bytes"] not in (MIB, 4 * MIB):
            continue
        wire = row["bytes"] * machine.costs.intra.per_byte * 1e6
        simulated = max(scan("all_scan", machine, state=row["bytes"])) * 1e6
        target = SLACK * (HOP_US * (ranks - 1) + wire)
        what = f"All-Scan of {row['bytes'] // MIB} MiB in a CUDA graph"
        lines.append(Line(ranks, what, "us", row["us"], target, simulated))
    return lines


def operator_lines(ranks: int, rows: Sequence[dict[str, Any]]) -> list[Line]:
    """What All-Scan adds to the operator, forward and backward, over the same kernels unsharded.

    The scan starts once a rank's state is known and ends where it is read: simulated is what it takes in both
    directions, as if nothing hid it.
    """
    machine = Machine.of(ranks, ranks)
    alone = {(row["gate"], row["tokens"]): row["us"] for row in rows if row["schedule"] == "unsharded"}
    both = 2e6 * max(scan("all_scan", machine))
    return [
        Line(
            ranks,
            f"operator over unsharded, gate per {row['gate']}, {row['tokens'] >> 10}k tokens a rank",
            "",
            row["over"],
            MOST_OVERHEAD,
            both / alone[row["gate"], row["tokens"]],
        )
        for row in rows
        if row["schedule"] == "all_scan" and row["ranks"] == ranks
    ]


def model_lines(ranks: int, rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Tokens a second and GPU of the 1B model, of what data parallelism reaches."""
    rates = {row["schedule"]: row["tokens_a_second"] for row in rows}
    forward, backward = layers(TOKENS, "h200")
    machine = Machine.of(ranks, ranks)
    seconds = [step(way, machine, forward, backward, TOKENS) for way in ("none", "all_scan")]
    share = rates["all_scan"] / rates["data parallel"]
    return [
        Line(
            ranks,
            "1B model, of data parallel",
            "",
            share,
            LEAST_OF_DATA_PARALLEL,
            seconds[0] / seconds[1],
            at_least=True,
        )
    ]


def summary(ranks: int, folder: Path) -> list[Line]:
    """From the results of ``run``."""

    def rows(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((folder / name / "results.json").read_text())["rows"]
        return found

    return [
        *scan_lines(ranks, rows("collectives")),
        *operator_lines(ranks, rows("sharded_operator")),
        *model_lines(ranks, rows("gla_model")),
    ]


def markdown(lines: Sequence[Line]) -> str:
    def shown(line: Line, value: float) -> str:
        return f"{value:.1f} {line.unit}" if line.unit else f"{100 * value:.1f} %"

    table = ["| ranks | what | measured | target | met | simulated |", "|---|---|---|---|---|---|"]
    for line in lines:
        bound = f"{'at least' if line.at_least else 'at most'} {shown(line, line.target)}"
        told = f"{shown(line, line.measured)} | {bound} | {'yes' if line.met else 'no'}"
        table.append(f"| {line.ranks} | {line.what} | {told} | {shown(line, line.simulated)} |")
    return "\n".join(table) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/one_host"))
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks; all GPUs if none is given")
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if not arguments.ranks:
        import torch

        arguments.ranks = [torch.cuda.device_count()]
    lines: list[Line] = []
    for ranks in arguments.ranks:
        if ranks < 2:
            parser.error(f"{ranks} ranks: a scan takes two at least")
        folder = arguments.out / f"{ranks}_ranks"
        if not arguments.summary:
            run(ranks, folder)
        lines += summary(ranks, folder)
        found = [{**asdict(line), "met": line.met} for line in lines]
        (arguments.out / "summary.json").write_text(json.dumps(found, indent=1))
        (arguments.out / "summary.md").write_text(markdown(lines))
    print(markdown(lines))


if __name__ == "__main__":
    main()
