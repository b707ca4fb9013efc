"""Measures what a message between ranks costs, for ``schedule="auto"`` and the default number of blocks.

    torchrun --nproc-per-node 2 -m zeco_compile.tune                  NCCL where every rank has a GPU, else gloo
    torchrun --nproc-per-node 2 -m zeco_compile.tune --backend gloo

A block goes back and forth between two neighbours, each of which does to it what a scan does (decay and add), over
the scan's own transport; then small blocks follow each other one way, for the gap. Inside of a host rank 0 and its
neighbour measure, between hosts the first two neighbours that are on different ones; the others wait. The line
through the medians is kept in :func:`zeco_compile.lowering.links.cache_file` of every rank's home, for as many
ranks as there are. Rank 0's is what counts when a model is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from zeco_compile.lowering import cost_model, links
from zeco_compile.lowering.communicator import Communicator, Link, communicator_for

SIZES = tuple(1 << power for power in range(12, 25, 2))
"""Bytes of a message: 4 KiB to 16 MiB."""

_SMALL = 1 << 12
_IN_A_ROW = 32


@dataclass(frozen=True)
class Measured:
    """One kind of link: the medians of single messages (bytes, seconds), and the line through them."""

    where: str
    ranks: tuple[int, int]
    times: tuple[tuple[int, float], ...]
    cost: cost_model.LinkCost


def measure(
    group: str, device: torch.device, sizes: Sequence[int] = SIZES, repeats: int = 20
) -> list[Measured]:
    """Times the links of the group; every rank calls this, and gets the same.

    Inside of a host, and between hosts, where the group has neighbours of that kind. Raises what transfers raise.
    """
    communicator = communicator_for(group, device)
    hosts = communicator.links.hosts
    neighbours = list(enumerate(pairwise(hosts)))
    found = []
    for where, same in (("intra", True), ("inter", False)):
        rank = next((rank for rank, (one, other) in neighbours if (one == other) == same), None)
        if rank is not None:
            pair = (rank, rank + 1)
            times = tuple((size, _there_and_back(communicator, pair, size, repeats) / 2) for size in sizes)
            gap = _one_way(communicator, pair, repeats)
            found.append(
                Measured(where, pair, times, cost_model.fit(times, gap, f"measured by ranks {pair}"))
            )
    return found


def _there_and_back(communicator: Communicator, pair: tuple[int, int], size: int, repeats: int) -> float:
    """Seconds, the median, equal on every rank."""
    mine, state, decay = (torch.zeros(max(1, size // 4), device=communicator.device) for _ in range(3))

    def once(link: Link) -> None:
        if link.rank not in pair:
            return
        other = pair[1 - pair.index(link.rank)]
        for sends in (link.rank == pair[0], link.rank != pair[0]):
            if sends:
                link.post(sends=[(other, mine)]).wait()
                link.flush()
            else:
                link.post(receives=[(other, mine)]).wait()
                torch.addcmul(state, decay, mine, out=mine)

    return _median(communicator, pair[0], repeats, once)


def _one_way(communicator: Communicator, pair: tuple[int, int], repeats: int) -> float:
    """Seconds from one small message to the next."""
    blocks = [torch.zeros(_SMALL // 4, device=communicator.device) for _ in range(_IN_A_ROW)]

    def once(link: Link) -> None:
        if link.rank not in pair:
            return
        other = pair[1 - pair.index(link.rank)]
        for block in blocks:
            if link.rank == pair[0]:
                link.post(sends=[(other, block)])
            else:
                link.post(receives=[(other, block)]).wait()
        link.flush()
        if link.rank == pair[0]:  # the last has arrived when an answer does
            link.post(receives=[(other, blocks[0])]).wait()
        else:
            link.post(sends=[(other, blocks[0])]).wait()
            link.flush()

    return _median(communicator, pair[0], repeats, once) / (_IN_A_ROW + 1)


def _median(communicator: Communicator, timer: int, repeats: int, once: Any) -> float:
    """Of the seconds that ``once(link)`` takes on rank ``timer``, after a few to warm up; the same on every rank."""
    seconds = []
    for number in range(repeats + 3):
        communicator.run("tune", lambda link: link.all_reduce(torch.zeros(1, device=communicator.device)))
        _synchronise(communicator)
        start = time.perf_counter()
        communicator.run("tune", once)
        _synchronise(communicator)
        if number >= 3:
            seconds.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(seconds)], dtype=torch.float64, device=communicator.device)
    return float(communicator.run("tune", lambda link: link.broadcast(median, timer)))


def _synchronise(communicator: Communicator) -> None:
    if communicator.device.type == "cuda":
        torch.cuda.synchronize(communicator.device)


def _table(found: Sequence[Measured]) -> Table:
    table = Table(title="what a message costs")
    for column in ("link", "ranks", "latency (alpha)", "gap", "a byte (beta)", "farthest from the line"):
        table.add_column(column)
    for each in found:
        cost = each.cost
        table.add_row(
            each.where,
            f"{each.ranks[0]}, {each.ranks[1]}",
            f"{cost.latency * 1e6:.1f} µs",
            f"{cost.gap * 1e6:.1f} µs",
            f"{cost.per_byte * 1e9:.4f} ns",
            f"{cost.spread:.0%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m zeco_compile.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl where there are GPUs")
    parser.add_argument("--repeats", type=int, default=20, help="of each message (default: 20)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, keep nothing")
    options = parser.parse_args(arguments)
    backend = options.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        if dist.get_world_size() < 2:
            parser.error("one rank has no links: start it with torchrun --nproc-per-node 2 or more")
        world = dist.group.WORLD
        assert world is not None
        found = measure(world.group_name, device, repeats=options.repeats)
        by_kind = {each.where: each.cost for each in found}
        path = None
        if not options.dry_run and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            path = links.save(backend, dist.get_world_size(), by_kind.get("intra"), by_kind.get("inter"))
        if dist.get_rank() == 0:
            Console().print(_table(found))
            print(json.dumps([asdict(each) for each in found]))
            if path is not None:
                print(f"kept in {path} under {links.key(backend, dist.get_world_size())!r}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
