"""Scans over ranks, and other exchanges, as events: when each rank has what it waits for.

A message occupies its port for ``gap + bytes * per_byte`` and arrives ``latency + bytes * per_byte`` after it starts
(lowering/cost_model.py); a rank has one port to the ranks of its host and one to other hosts, which serve in order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
from paper_model import DECAY, KEY, STATE

from zeco_compile.lowering import cost_model
from zeco_compile.lowering.cost_model import LinkCosts, runs


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
