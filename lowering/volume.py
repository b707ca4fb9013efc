"""Bytes that a rank sends: counted where they are sent, and as formulas for the report.

|S| is one rank's state, B*H*K*V elements; |M| its total decay, B*H*K elements (B*H when the gate is per
head). All figures are per rank and layer, for one direction; training sends the same again in the backward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zeco_compile.lowering.cost_model import runs

_lock = threading.Lock()
_sent: Counter[str] = Counter()


def count(label: str, amount: int) -> None:
    """Add ``amount`` bytes sent by this process under ``label``."""
    with _lock:
        _sent[label] += amount


def sent() -> dict[str, int]:
    """Bytes that this process has sent since the last :func:`reset`, by label ("scan", ...)."""
    with _lock:
        return dict(_sent)


def reset() -> None:
    """Set the counters back to zero."""
    with _lock:
        _sent.clear()


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one attention layer on one rank; ``length`` is the rank's slice of the sequence.

    ``decay_width`` is K for a gate per channel, 1 for a gate per head or none. ``value_bytes`` is the size of
    an element of k and v, ``state_bytes`` of the state's (4 for float32).
    """

    batch: int
    length: int
    heads: int
    key_dim: int
    value_dim: int
    decay_width: int
    value_bytes: int
    state_bytes: int = 4

    @property
    def state(self) -> int:
        return self.batch * self.heads * self.key_dim * self.value_dim * self.state_bytes

    @property
    def decay(self) -> int:
        return self.batch * self.heads * self.decay_width * self.state_bytes

    @property
    def keys_and_values(self) -> int:
        return self.batch * self.length * self.heads * (self.key_dim + self.value_dim) * self.value_bytes


def chain_bytes(size: LayerSize, rank: int, world_size: int) -> int:
    """All-Scan and the unpipelined ring: one state, whatever the number of ranks; the last sends nothing."""
    return size.state if rank < world_size - 1 else 0


def tree_bytes(size: LayerSize, rank: int, world_size: int) -> int:
    """Log-depth scan: a shift by one rank, then a rank at distance 1, 2, 4, ... as long as there is one.

    The decay goes along while what is sent does not yet reach back to the first rank.
    """
    return two_level_bytes(size, rank, range(world_size))


def two_level_bytes(size: LayerSize, rank: int, hosts: Sequence[int]) -> int:
    """Chain inside of a host, tree between hosts; ``hosts[p]`` is the host of rank p, ranks in the scan's order.

    Inside, a rank sends the state (and beyond the first host the decay) on, and later what comes into the host.
    The last of a host sends the host's total to the next one, and the first ranks of the hosts make the tree.
    """
    found = runs(hosts)
    number = next(number for number, host in enumerate(found) if rank in host)
    pair = size.state + (size.decay if number > 0 else 0)
    total = 0
    if rank + 1 < found[number].stop:
        total += pair + (size.state if number > 0 else 0)
    elif number + 1 < len(found):
        total += pair
    if rank == found[number].start and number > 0:
        distance = 1
        while number + distance < len(found):
            total += size.state + (size.decay if number > distance else 0)
            distance *= 2
    return total


def gather_states_bytes(size: LayerSize, world_size: int) -> int:
    """All-gather of states and decays (LASP-2): each rank's pair reaches every other rank."""
    return (world_size - 1) * (size.state + size.decay)


def gather_keys_and_values_bytes(size: LayerSize, world_size: int) -> int:
    """All-gather of k and v, what softmax attention needs: grows with the length."""
    return (world_size - 1) * size.keys_and_values


def schedule_bytes(
    schedule: str, size: LayerSize, rank: int, world_size: int, hosts: Sequence[int] | None = None
) -> int:
    """Bytes that group rank ``rank`` sends in one forward scan of ``schedule``.

    ``hosts[p]`` is the host of rank p, which only "two_level" looks at; None is one host for all. The backward
    scan runs from the last rank to the first, so there ``rank`` counts from the end, and ``hosts`` too.
    """
    if schedule in ("all_scan", "lasp1"):
        return chain_bytes(size, rank, world_size)
    if schedule == "all_scan_tree":
        return tree_bytes(size, rank, world_size)
    if schedule == "two_level":
        return two_level_bytes(size, rank, hosts or [0] * world_size)
    if schedule == "lasp2":
        return gather_states_bytes(size, world_size)
    raise ValueError(f"no schedule {schedule!r}: one of all_scan, all_scan_tree, two_level, lasp1, lasp2")
