"""How long a scan over the ranks takes, by schedule, from what a message costs; pure arithmetic.

A message of b bytes over a link arrives after ``latency + b * per_byte``; the link can take the next one after
``gap + b * per_byte``. That is the usual alpha and beta, with the part of alpha told apart that cannot be
hidden behind the message before (LogGP, Alexandrov et al., 1995): a kernel that writes into the neighbour's memory has
many blocks in flight and nearly no gap, while a transfer that the host starts has a gap as long as its latency.
``per_byte`` includes what the receiver does with a byte, decay and add.

With S the state's bytes, M the decay's, P ranks, n blocks, and t = latency + bytes * per_byte of a hop:

    chain      sum of t(S/n) over the hops + (n - 1) * the largest (gap + S/n * per_byte)
    tree       a shift by one rank and ceil(log2(P - 1)) rounds, each the largest t(S + M) over its pairs
    two_level  the chain of the largest host with M beside its first block, a shift and ceil(log2(hosts - 1))
               rounds between hosts, the chain of the largest host again (one host: the chain)
    lasp1      the chain in one block
    lasp2      a ring all-gather: (P - 1) * the largest t(S + M); the folding of what came is not counted

Links inside of a host and between hosts are apart. Each rank has a link of its own to other hosts. The numbers come
from :mod:`~zeco_compile.lowering.links`: measured by ``python -m zeco_compile.tune``, or the defaults here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from zeco_compile.lowering.errors import InvalidLinkCosts, InvalidSchedule

# A pipeline of fewer blocks that takes at most this much longer is taken: every block is a message more.
_NEARLY = 1.02

AUTO = ("all_scan", "all_scan_tree", "two_level")
"""What ``schedule="auto"`` picks from, the first of equals. "lasp1" and "lasp2" are never faster: the one is a chain
in one block, the other makes as many hops as the chain and carries the decay."""

SCHEDULES = (*AUTO, "lasp1", "lasp2")


@dataclass(frozen=True)
class LinkCost:
    """``latency`` and ``gap`` in seconds a message, ``per_byte`` in seconds a byte; ``source`` says where from.

    ``spread`` is the largest relative difference between a measured time and the line through all.
    """

    latency: float
    per_byte: float
    gap: float
    source: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "per_byte", "gap"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise InvalidLinkCosts(
                    f"the {name} of a link is {value!r}: it has to be a time, zero or more."
                )

    def seconds(self, amount: float) -> float:
        """Until a message of ``amount`` bytes is there."""
        return self.latency + amount * self.per_byte

    def occupied(self, amount: float) -> float:
        """Until the link can take the message after one of ``amount`` bytes."""
        return self.gap + amount * self.per_byte


@dataclass(frozen=True)
class LinkCosts:
    """The links inside of a host, and those between hosts."""

    intra: LinkCost
    inter: LinkCost

    def of(self, same_host: bool) -> LinkCost:
        return self.intra if same_host else self.inter


@dataclass(frozen=True)
class Plan:
    """How a scan goes: ``schedule`` is never "auto", ``blocks`` at least 1, ``seconds`` what the model predicts."""

    schedule: str
    blocks: int
    seconds: float


def fit(times: Sequence[tuple[int, float]], gap: float | None = None, source: str = "measured") -> LinkCost:
    """The line through (bytes, seconds) of single messages that is nearest in relative terms.

    Weighted by 1/seconds², so that small messages, which tell the latency, count as much as large ones. A slope or
    an intercept below zero is noise, and becomes zero. ``gap`` is the seconds between small messages that follow
    each other; None, or more than the latency, is the latency. Raises InvalidLinkCosts for fewer than two sizes.
    """
    if len({amount for amount, _ in times}) < 2 or any(seconds <= 0 for _, seconds in times):
        raise InvalidLinkCosts(
            f"a latency and a cost per byte need messages of two sizes at least, and times above zero: {times}."
        )
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    mean_amount = sum(w * amount for w, (amount, _) in zip(weights, times, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, times, strict=True)) / total
    spread_of_amounts = sum(
        w * (amount - mean_amount) ** 2 for w, (amount, _) in zip(weights, times, strict=True)
    )
    together = sum(
        w * (amount - mean_amount) * (seconds - mean_seconds)
        for w, (amount, seconds) in zip(weights, times, strict=True)
    )
    per_byte = max(0.0, together / spread_of_amounts)
    latency = max(0.0, mean_seconds - per_byte * mean_amount)
    spread = max(abs(latency + per_byte * amount - seconds) / seconds for amount, seconds in times)
    return LinkCost(latency, per_byte, latency if gap is None else min(gap, latency), source, spread)


_MIB = 1 << 20
# NVLink between two H200s: a hop that a kernel makes through symmetric memory, replayed from a CUDA graph
# (benchmarks/collectives.py). Its blocks are programs side by side: no gap.
_SYMMETRIC = fit(
    [(_MIB // 16, 5.2e-6), (_MIB // 4, 6.2e-6), (_MIB, 7.1e-6), (4 * _MIB, 16.8e-6), (16 * _MIB, 52.2e-6)],
    0.0,
    "default: symmetric memory between two H200s, CUDA graph",
)
# The same pair: ncclSend and ncclRecv, as called from Python, which is how the scan calls them.
_NCCL = fit(
    [(_MIB // 16, 81e-6), (_MIB, 80e-6), (4 * _MIB, 74e-6), (16 * _MIB, 105e-6)],
    source="default: NCCL between two H200s, called from Python",
)
# `torchrun --nproc-per-node 2 -m zeco_compile.tune --backend gloo` on two cores that others used too; from run to run
# the latency was 330 to 720 µs.
_GLOO = fit(
    [
        *((4096, 408e-6), (16384, 389e-6), (65536, 343e-6), (262144, 505e-6)),
        *((_MIB, 969e-6), (4 * _MIB, 4365e-6), (16 * _MIB, 12395e-6)),
    ],
    193e-6,
    "default: gloo between two processes on two cores",
)
# Nothing was measured between hosts. A nominal 400 Gb/s a GPU, and the latency inside of a host twice.
_NETWORK_PER_BYTE = 8 / 400e9


def _assumed(intra: LinkCost) -> LinkCost:
    return LinkCost(
        2 * intra.latency,
        max(intra.per_byte, _NETWORK_PER_BYTE),
        2 * intra.gap,
        "assumed: 400 Gb/s a rank, twice the latency inside of a host",
    )


DEFAULTS: dict[str, LinkCosts] = {
    name: LinkCosts(intra, _assumed(intra))
    for name, intra in (("gloo", _GLOO), ("nccl", _NCCL), ("symmetric", _SYMMETRIC))
}
"""By wire; used where nothing was measured."""


def runs(hosts: Sequence[int]) -> list[range]:
    """The neighbouring ranks that are on one host each, in order; ``hosts[p]`` is the host of rank p."""
    edges = [0, *(p for p in range(1, len(hosts)) if hosts[p] != hosts[p - 1]), len(hosts)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def chain_seconds(costs: LinkCosts, hosts: Sequence[int], state: float, blocks: int) -> float:
    """Chain over all ranks in ``blocks`` parts; ``state`` in bytes. 0.0 for one rank."""
    between = sum(one != other for one, other in pairwise(hosts))
    return _pipeline(costs, len(hosts) - 1 - between, between, state, blocks)


def _pipeline(costs: LinkCosts, inside: int, between: int, state: float, blocks: int) -> float:
    if inside + between == 0:
        return 0.0
    part = state / blocks
    kinds = [(costs.intra, inside), (costs.inter, between)]
    first = sum(count * link.seconds(part) for link, count in kinds)
    return first + (blocks - 1) * max(link.occupied(part) for link, count in kinds if count)


def tree_seconds(costs: LinkCosts, hosts: Sequence[int], state: float, decay: float) -> float:
    """Log-depth scan over all ranks."""
    return _tree(costs, hosts, list(range(len(hosts))), state + decay)


def _tree(costs: LinkCosts, hosts: Sequence[int], ranks: Sequence[int], amount: float) -> float:
    """A shift by one of ``ranks``, then an inclusive scan over all of them but the first."""
    if len(ranks) < 2:
        return 0.0
    total = _round(costs, hosts, ranks, 1, amount)
    distance = 1
    while distance < len(ranks) - 1:
        total += _round(costs, hosts, ranks[1:], distance, amount)
        distance *= 2
    return total


def _round(
    costs: LinkCosts, hosts: Sequence[int], ranks: Sequence[int], distance: int, amount: float
) -> float:
    kinds = {hosts[p] == hosts[q] for p, q in zip(ranks, ranks[distance:], strict=False)}
    return max(costs.of(kind).seconds(amount) for kind in kinds)


def two_level_seconds(
    costs: LinkCosts, hosts: Sequence[int], state: float, decay: float, blocks: int
) -> float:
    """Chain in ``blocks`` parts inside of the hosts, tree between them."""
    found = runs(hosts)
    longest = max(map(len, found))
    inside = _pipeline(costs, longest - 1, 0, state, blocks)
    if len(found) == 1:
        return inside
    along = decay * costs.intra.per_byte * (longest - 1)
    return 2 * inside + along + _tree(costs, hosts, [host.start for host in found], state + decay)


def gather_seconds(costs: LinkCosts, hosts: Sequence[int], amount: float) -> float:
    """All-gather of ``amount`` bytes a rank around a ring of all ranks."""
    kinds = {one == other for one, other in pairwise(hosts)}
    return (len(hosts) - 1) * max((costs.of(kind).seconds(amount) for kind in kinds), default=0.0)


def seconds(
    schedule: str, costs: LinkCosts, hosts: Sequence[int], state: float, decay: float, blocks: int
) -> float:
    """Of one scan in one direction. Raises InvalidSchedule for a name that is none of :data:`SCHEDULES`."""
    if schedule == "all_scan":
        return chain_seconds(costs, hosts, state, blocks)
    if schedule == "lasp1":
        return chain_seconds(costs, hosts, state, 1)
    if schedule == "all_scan_tree":
        return tree_seconds(costs, hosts, state, decay)
    if schedule == "two_level":
        return two_level_seconds(costs, hosts, state, decay, blocks)
    if schedule == "lasp2":
        return gather_seconds(costs, hosts, state + decay)
    raise InvalidSchedule(f"There is no schedule {schedule!r} to predict: use one of {', '.join(SCHEDULES)}.")


def best_blocks(
    schedule: str, costs: LinkCosts, hosts: Sequence[int], state: float, decay: float, rows: int
) -> int:
    """The least number of blocks, at most ``rows`` (K), that is within 2 % of the fastest; 1 without a pipeline."""
    if schedule not in ("all_scan", "two_level"):
        return 1
    times = [seconds(schedule, costs, hosts, state, decay, n) for n in range(1, max(1, rows) + 1)]
    enough = min(times) * _NEARLY
    return next(n for n, time in enumerate(times, 1) if time <= enough)


@lru_cache(maxsize=1024)
def plan(
    costs: LinkCosts,
    hosts: tuple[int, ...],
    state: int,
    decay: int,
    rows: int,
    schedule: str = "auto",
    blocks: int = 0,
) -> Plan:
    """What runs where the user asked for ``schedule`` ("auto": the fastest of :data:`AUTO`) and ``blocks``.

    ``state`` and ``decay`` in bytes of one rank, ``rows`` the state's K, ``blocks`` below 1: the best number.
    ``hosts[p]`` is the host of rank p, in the order of the scan or the reverse. Depends on nothing else, so ranks
    that pass the same get the same. Raises InvalidSchedule.
    """
    plans = []
    for name in AUTO if schedule == "auto" else (schedule,):
        count = (
            min(blocks, max(1, rows)) if blocks > 0 else best_blocks(name, costs, hosts, state, decay, rows)
        )
        plans.append(Plan(name, count, seconds(name, costs, hosts, state, decay, count)))
    return min(plans, key=lambda each: each.seconds)  # the first of equals


# On an H200 (benchmarks/sharded_operator.py, collectives.py): what a scan takes, for each rank of the chain, and what
# it costs a token and head, in one direction, to have all attention matrices made beside it and read again.
_SECONDS_A_RANK = 6e-6
_SECONDS_OF_PAIRS = {"channel": 4.6e-10, "head": 1.3e-10}


def worth_hiding(world_size: int, rows: int, per_channel: bool) -> bool:
    """Whether the scan takes longer than the work that is only there to hide it.

    That work: to make the attention matrices inside of all chunks beside the scan, and read them back after it, instead
    of making them where they are needed, in no memory. ``rows`` is B * T * H of one rank, ``per_channel`` whether the
    gate has a value for each channel. Sizes alone decide, so ranks with slices of one length decide alike, and a trace
    needs no other rank.
    """
    pairs = _SECONDS_OF_PAIRS["channel" if per_channel else "head"]
    return world_size * _SECONDS_A_RANK > rows * pairs
