"""A discrete-event simulation of sequence parallelism on 2 to 4096 ranks: scans, and whole training steps.

    python benchmarks/simulate.py --out FOLDER [--ranks-per-host 8] [--quick]
    python benchmarks/simulate.py --out FOLDER --plot simulation.json       draws again

Prints tables, and writes FOLDER/simulation.json and FOLDER/simulation_*.png (``pip install zeco_compile[bench]``).

What is simulated: every rank has a compute stream, a port to the ranks of its host and one to other hosts. A message
occupies its port for ``gap + bytes * per_byte`` and arrives ``latency + bytes * per_byte`` after it starts
(lowering/cost_model.py); ports serve in order. A rank takes part in a layer's scan when it gets there itself, so
delays travel from layer to layer as they would. What is not: contention inside of the network, jitter between ranks,
what a message costs the kernels beside it.

Where the numbers are from stands in :data:`INPUTS`, and goes into the results.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCosts, runs

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20

# GLA with 1B parameters, as in the paper: 20 layers, d = 2048, 16 heads with K = V = 128
LAYERS, WIDTH, HEADS, KEY, VALUE = 20, 2048, 16, 128, 128
STATE, DECAY = HEADS * KEY * VALUE * 4, HEADS * KEY * 4

# Paper (arXiv 2507.01004): tokens/s/GPU of that model, by tokens per rank; milliseconds by GPUs.
PAPER_ALONE = {16384: 42838}
PAPER_AT_256 = {16384: {"ZeCO": 34400, "LASP-2": 15196}, 32768: {"ZeCO": 40967, "LASP-2": 25402}}
PAPER_SCAN_MS = {8: 0.14, 256: 0.60}
PAPER_OPERATOR_MS = 6.55

INPUTS = {
    "links inside of a host": cost_model.DEFAULTS["symmetric"].intra.source,
    "links between hosts": cost_model.DEFAULTS["symmetric"].inter.source,
    "scans to compare with": "benchmarks/results/collectives_2xh200.json, symmetric memory, CUDA graph, two H200s",
    "operator": "benchmarks/results/gla_operator_h200.json, CUDA graph, H200",
    "rest of the model": "16k tokens at the paper's 42838 tokens/s/GPU (data parallel), less 20 operators of 6.55 ms; "
    "per token the same at every length",
    "parts of the operator": "assumed: 30 % before the scan starts, 30 % beside it, 40 % after it, either direction",
}


class Simulation:
    """Events in the order of their times; of equal times the first that was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


class _After:
    """Acts when it has been called ``count`` times."""

    def __init__(self, count: int, act: Callable[[], None]) -> None:
        self._left, self._act = count, act

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


@dataclass(frozen=True)
class Machine:
    """Ranks by host (``hosts[p]``), and what messages cost between them."""

    hosts: tuple[int, ...]
    costs: LinkCosts

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @classmethod
    def of(cls, ranks: int, per_host: int = 8, costs: LinkCosts | None = None) -> Machine:
        return cls(
            tuple(rank // per_host for rank in range(ranks)), costs or cost_model.DEFAULTS["symmetric"]
        )

    def reversed(self) -> Machine:
        return replace(self, hosts=self.hosts[::-1])


class _Network:
    """The ports of all ranks."""

    def __init__(self, machine: Machine, simulation: Simulation) -> None:
        self._machine, self._simulation = machine, simulation
        self._free: dict[tuple[int, bool], float] = {}

    def send(self, source: int, to: int, amount: float, arrived: Callable[[], None]) -> None:
        hosts = self._machine.hosts
        same = hosts[source] == hosts[to]
        link, port = self._machine.costs.of(same), (source, same)
        start = max(self._simulation.now, self._free.get(port, 0.0))
        self._free[port] = start + link.occupied(amount)
        self._simulation.at(start + link.seconds(amount), arrived)


def scan(
    schedule: str,
    machine: Machine,
    ready: Sequence[float] | None = None,
    *,
    state: float = STATE,
    decay: float = DECAY,
    blocks: int | None = None,
) -> list[float]:
    """When each rank has the state that comes into it, seconds; ``ready[p]`` when rank p has its own (default 0).

    ``state`` and ``decay`` in bytes; ``blocks`` None: the best by the cost model. Rank 0 waits for nothing.
    """
    starts = [0.0] * machine.ranks if ready is None else list(ready)
    if machine.ranks == 1:
        return starts
    costs, hosts = machine.costs, machine.hosts
    if schedule == "lasp2":
        return ring_gather(machine, starts, state + decay)
    if blocks is None:
        blocks = cost_model.plan(costs, hosts, round(state), round(decay), KEY, schedule).blocks
    everyone = range(machine.ranks)
    groups = {
        "all_scan": lambda: [everyone],
        "lasp1": lambda: [everyone],
        "all_scan_tree": lambda: [range(p, p + 1) for p in everyone],
        "two_level": lambda: runs(hosts),
    }[schedule]()
    return _Levels(machine, starts, state, decay, 1 if schedule == "lasp1" else blocks, groups).arrivals()


class _Levels:
    """What lowering/all_scan.py's ``_levels`` does, as events: chain in a host, tree between hosts, chain again."""

    def __init__(
        self,
        machine: Machine,
        ready: Sequence[float],
        state: float,
        decay: float,
        blocks: int,
        hosts: Sequence[range],
    ) -> None:
        self._simulation = Simulation()
        self._network = _Network(machine, self._simulation)
        self._ready, self._hosts, self._blocks = ready, hosts, blocks
        self._state, self._decay = state, decay
        self._arrived = [0.0] * machine.ranks
        self._heads = [_Head(self, place) for place in range(len(hosts) - 1)]

    def arrivals(self) -> list[float]:
        for number in range(len(self._hosts)):
            self._first_chain(number)
        self._simulation.run()
        return self._arrived

    def _complete(self, rank: int) -> None:
        self._arrived[rank] = self._simulation.now

    def _first_chain(self, number: int) -> None:
        host = self._hosts[number]
        last = host.stop - 1
        decay = self._decay if number > 0 else 0.0
        # a host's total leaves when all blocks of its last rank are updated
        total = _After(self._blocks, lambda: self._shift(number))
        onward: dict[tuple[int, int], _After] = {}

        def updated(rank: int, block: int) -> Callable[[], None]:
            if rank == last:
                return total
            amount = self._state / self._blocks + (decay if block == 0 else 0.0)
            return lambda: self._network.send(rank, rank + 1, amount, received(rank + 1, block))

        # a block goes on when it is there and the rank's own state is
        for rank in host:
            for block in range(self._blocks):
                onward[rank, block] = _After(1 if rank == host.start else 2, updated(rank, block))

        final = {
            rank: _After(self._blocks, lambda rank=rank: self._complete(rank)) for rank in host if number == 0
        }

        def received(rank: int, block: int) -> Callable[[], None]:
            def act() -> None:
                if number == 0:
                    final[rank]()
                onward[rank, block]()

            return act

        for rank in host:
            for block in range(self._blocks):
                self._simulation.at(self._ready[rank], onward[rank, block])
        if number == 0:
            self._arrived[host.start] = self._ready[host.start]

    def _shift(self, number: int) -> None:
        if number + 1 < len(self._hosts):
            amount = self._state + (self._decay if number > 0 else 0.0)
            to = self._hosts[number + 1].start
            self._network.send(self._hosts[number].stop - 1, to, amount, self._heads[number].received[0])

    def between(self, place: int, distance: int, act: Callable[[], None]) -> None:
        """From the head at ``place`` to the one at ``place + distance``."""
        source, to = self._hosts[place + 1].start, self._hosts[place + distance + 1].start
        amount = self._state + (self._decay if place >= distance else 0.0)
        self._network.send(source, to, amount, act)

    def heads(self) -> list[_Head]:
        return self._heads

    def down(self, place: int) -> None:
        """The state that comes into a host is at its first rank: pass it on in blocks."""
        host = self._hosts[place + 1]
        self._complete(host.start)

        def send(rank: int, block: int) -> None:
            if rank + 1 < host.stop:
                amount = self._state / self._blocks
                self._network.send(rank, rank + 1, amount, lambda: received(rank + 1, block))

        def received(rank: int, block: int) -> None:
            if block == self._blocks - 1:
                self._complete(rank)
            send(rank, block)

        for block in range(self._blocks):
            send(host.start, block)


class _Head:
    """The first rank of a host beyond the first, in the inclusive scan over these ranks."""

    def __init__(self, levels: _Levels, place: int) -> None:
        self._levels, self._place = levels, place
        rounds = [0]
        while 1 << (len(rounds) - 1) <= place:
            rounds.append(len(rounds))
        # round 0 waits for the shift; round k for the sum of round k - 1 and the head 2^(k-1) before
        self.received = [_After(1 if number == 0 else 2, self._sum_of(number)) for number in rounds]

    def _sum_of(self, number: int) -> Callable[[], None]:
        def act() -> None:
            heads, distance = self._levels.heads(), 1 << number
            if self._place + distance < len(heads):
                partner = heads[self._place + distance]
                self._levels.between(self._place, distance, partner.received[number + 1])
            if number + 1 < len(self.received):
                self.received[number + 1]()
                return
            # complete: it also goes to all partners further on
            further = distance * 2
            while self._place + further < len(heads):
                partner = heads[self._place + further]
                self._levels.between(self._place, further, partner.received[further.bit_length()])
                further *= 2
            self._levels.down(self._place)

        return act


def ring_gather(machine: Machine, ready: Sequence[float], amount: float) -> list[float]:
    """When each rank has all ranks' ``amount`` bytes, passed around a ring; step by step, all ranks at once."""
    hosts = numpy.array(machine.hosts)
    same = hosts == numpy.roll(hosts, -1)
    intra, inter = machine.costs.intra, machine.costs.inter
    arrives = numpy.where(same, intra.seconds(amount), inter.seconds(amount))
    occupies = numpy.where(same, intra.occupied(amount), inter.occupied(amount))
    have = numpy.array(ready, dtype=float)
    free = have.copy()
    for _ in range(machine.ranks - 1):
        start = numpy.maximum(have, free)
        free = start + occupies
        have = numpy.maximum(have, numpy.roll(start + arrives, 1))
    return have.tolist()


def all_to_all(machine: Machine, ready: Sequence[float], amount: float) -> list[float]:
    """When each rank has its part of ``amount`` bytes from every other; each sends its parts one after the other."""
    part = amount / machine.ranks
    begun = max(ready)
    members = numpy.bincount(numpy.array(machine.hosts))
    out = []
    for host in machine.hosts:
        inside, outside = int(members[host]) - 1, machine.ranks - int(members[host])
        spent = [
            (count - 1) * link.occupied(part) + link.seconds(part)
            for count, link in ((inside, machine.costs.intra), (outside, machine.costs.inter))
            if count
        ]
        out.append(begun + max(spent, default=0.0))
    return out


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer on one rank, by direction: the operator's parts around the scan, and all the rest."""

    before: float
    beside: float
    after: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.before + self.beside + self.after + self.rest

    @classmethod
    def of(cls, operator: float, rest: float) -> Layer:
        return cls(0.3 * operator, 0.3 * operator, 0.4 * operator, rest)


def step(method: str, machine: Machine, forward: Layer, backward: Layer, tokens: int) -> float:
    """Seconds of a forward and a backward of the whole model, until the last rank is through.

    ``method`` a schedule, "none" (no exchange: what data parallelism reaches), "all-gather of k and v", or
    "all-to-all" (Ulysses: q, k, v, g in and o out, heads split over ranks).
    """
    times = [0.0] * machine.ranks
    for layer, where in ((forward, machine), (backward, machine.reversed())):
        for _ in range(LAYERS):
            times = _through_layer(method, where, layer, times, tokens)
        times = times[::-1]  # the backward's first rank is the forward's last; and back
    return max(times)


def _through_layer(
    method: str, machine: Machine, layer: Layer, times: Sequence[float], tokens: int
) -> list[float]:
    begun = [time + layer.rest + layer.before for time in times]
    row = tokens * WIDTH * 2  # bytes of one of q, k, v, o in bf16; g is float32
    if machine.ranks == 1 or method == "none":
        there = begun
    elif method == "all-gather of k and v":
        there = ring_gather(machine, [time + layer.rest for time in times], 2 * row)
        return [time + layer.before + layer.beside + layer.after for time in there]
    elif method == "all-to-all":
        inward = all_to_all(machine, [time + layer.rest for time in times], 5 * row)
        done = [time + layer.before + layer.beside + layer.after for time in inward]
        return all_to_all(machine, done, row)
    else:
        there = scan(method, machine, begun)
    return [
        max(mine + layer.beside, arrived) + layer.after for mine, arrived in zip(begun, there, strict=True)
    ]


def layers(tokens: int, operator: str) -> tuple[Layer, Layer]:
    """Forward and backward; ``operator`` "paper" (6.55 ms at 16k) or "h200" (measured, this package's)."""
    rest = tokens / PAPER_ALONE[16384] / LAYERS - PAPER_OPERATOR_MS * 1e-3 * tokens / 16384
    if operator == "paper":
        both = PAPER_OPERATOR_MS * 1e-3 * tokens / 16384
        forward = both / 3
    else:
        times = json.loads((RESULTS / "gla_operator_h200.json").read_text())["shapes"][f"T={tokens}"]["times"]
        forward = times["zeco forward, graph"]["median_us"] * 1e-6
        both = times["zeco forward+backward, graph"]["median_us"] * 1e-6
    # a backward of matrix products takes twice as long as its forward
    return Layer.of(forward, rest / 3), Layer.of(both - forward, rest * 2 / 3)


METHODS = ("none", *cost_model.SCHEDULES, "all-gather of k and v", "all-to-all")
LABELS = {"none": "no exchange (data parallel)"}


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


COLOURS = {
    "none": "0.55",
    "all_scan": "tab:blue",
    "all_scan_tree": "tab:green",
    "two_level": "tab:red",
    "lasp1": "tab:cyan",
    "lasp2": "tab:orange",
    "all-gather of k and v": "tab:purple",
    "all-to-all": "tab:brown",
}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Four pictures: throughput, what the exchange costs, scan times, sweeps. ``results`` may come from the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 100})
    written = []

    def save(figure: Any, name: str) -> None:
        path = folder / f"simulation_{name}.png"
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)

    def powers(axis: Any, values: Sequence[float], size: float = 1.0) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value / size:g}" for value in values])
        axis.xaxis.set_minor_locator(ticker.NullLocator())

    def line(axis: Any, method: str, points: dict, value: Callable[[int], float], **style: Any) -> None:
        # on a logarithmic axis nothing has no place, nor has what rounding leaves of it
        ranks = [int(at) for at in points if value(int(at)) > 1e-3]
        style.setdefault("ls", "--" if method in ("none", "lasp1", "all_scan_tree") else "-")
        style.setdefault("label", LABELS.get(method, method))
        axis.plot(ranks, [value(at) for at in ranks], color=COLOURS[method], marker=".", **style)

    lost = "tokens/s lost to the exchange, %"
    for picture, what in (("throughput", "tokens/s/rank"), ("lost", lost)):
        figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), sharex=True, sharey="row")
        for axis, (name, values) in zip(axes.T.flat, results["tokens/s/rank"].items(), strict=True):
            alone = {int(ranks): rate for ranks, rate in values["none"].items()}

            def shown(rate: float, without: float, what: str = what) -> float:
                return rate if what != lost else 100 * (1 - rate / without)

            for method, points in values.items():
                rates = {int(ranks): rate for ranks, rate in points.items()}
                if what != lost or method != "none":
                    line(axis, method, rates, lambda at, r=rates, a=alone, f=shown: f(r[at], a[at]))
            if name.endswith("paper"):
                theirs = PAPER_AT_256[int(name.split()[0])]
                for (who, rate), mark in zip(theirs.items(), ("*", "X"), strict=True):
                    value = shown(rate, PAPER_ALONE[16384])
                    axis.plot(256, value, mark, color="black", ms=10, ls="none", label=f"paper, {who}")
            powers(axis, list(alone))
            axis.set_title(name, fontsize=10)
            axis.set_ylim(**({"bottom": 0} if what != lost else {"bottom": 0.01, "top": 100}))
            axis.set_yscale("linear" if what != lost else "log")
        for axis in axes[:, 0]:
            axis.set_ylabel(what)
        for axis in axes[-1]:
            axis.set_xlabel("ranks")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=5, bbox_to_anchor=(0.5, -0.04))
        figure.suptitle(f"simulated: 1B GLA, {results['ranks per host']} ranks a host", y=0.95)
        save(figure, picture)

    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    for schedule, points in results["scan seconds"].items():
        times = {int(ranks): seconds for ranks, seconds in points.items()}
        line(axis, schedule, times, lambda at, t=times: 1e6 * t[at], ls="-")
    measured = {
        row["ranks"]: row["measured_us"]
        for row in results["checks"]
        if row["bytes"] == results["state bytes"]
    }
    marks = (
        ({ranks: 1e3 * value for ranks, value in PAPER_SCAN_MS.items()}, "*", 11, "paper's All-Scan"),
        (measured, "x", 6, "measured chain (two H200s)"),
    )
    for points, mark, size, label in marks:
        axis.plot(
            list(points),
            list(points.values()),
            mark,
            color="black",
            ms=size,
            ls="none",
            label=label,
            zorder=5,
        )
    powers(axis, list(times))
    axis.set(yscale="log", xlabel="ranks", ylabel="µs until the last rank has its state")
    size = f"{results['state bytes'] / MIB:g} MiB, {results['ranks per host']} ranks a host"
    axis.set_title(f"simulated: one scan of {size}")
    axis.legend()
    save(figure, "scan")

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5))
    for axis, (name, values) in zip(axes.flat, results["sweeps at 64 ranks"].items(), strict=True):
        relative = name == "tokens per rank"
        for label, points in values.items():
            data = {int(at): value for at, value in points.items()}
            style = "--" if label.endswith("latency") or "tree" in label else "-"
            line(
                axis,
                label.partition(",")[0],
                data,
                lambda at, d=data, r=relative: 100 * (d[at] - 1) if r else 1e6 * d[at],
                ls=style,
                label=label,
            )
        powers(axis, list(data), MIB if name == "state bytes" else 1)
        axis.set_yscale("log")
        axis.set_xlabel("state, MiB" if name == "state bytes" else name)
        axis.set_ylabel("step time over one rank's alone, + %" if relative else "µs of one scan")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if name == "blocks" else (1,)))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.legend(fontsize=8)
    figure.suptitle("simulated: sweeps at 64 ranks, 8 a host", y=0.93)
    save(figure, "sweeps")
    return written


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
