"""Exclusive scans over the ranks: from each rank's state and total decay to the state that comes into it.

With S_p and M_p = exp(log_decay_p) the state that rank p makes of zero and its transition,

    S_in(0) = boundary (or zero),        S_in(p+1) = M_p S_in(p) + S_p.

Every algorithm is a function of a :class:`~zeco_compile.lowering.communicator.Link`, which counts the ranks
in the direction of the scan; run on a reversed link the same code scans from the last rank to the first.

    all_scan       chain in blocks along K: a rank receives a block, updates it, sends the *updated* block on
                   at once, and meanwhile receives the next. Each rank sends |S|, the least possible. This is
                   All-Scan of ZeCO (Chou et al., 2025), whose listing has a slip there: it sends the local
                   block on.
    lasp1          the same in one block: no pipeline (the ring of LASP-1, Sun et al., 2024).
    lasp2          all-gather of states and decays, each rank folds what comes before it (LASP-2, 2025).
    all_scan_tree  log-depth: partners at distance 1, 2, 4, ..., with the decay alongside (Hillis and Steele).
    two_level      the chain inside of a host, the tree between hosts: few slow hops, and inside a state in blocks.

states [B, H, K, V], log_decay [B, H, K] or [B, H, 1], all in one dtype, real or complex, contiguous, on the wire's
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zeco_compile.lowering.communicator import Link, Transfer
from zeco_compile.lowering.cost_model import runs
from zeco_compile.lowering.errors import InvalidSchedule

Algorithm = Callable[[Link, Tensor, Tensor, Tensor | None, int], Tensor]
"""(link, state, log_decay, boundary, blocks) -> S_in [B, H, K, V], fresh and contiguous."""


def check_schedule(schedule: str) -> str:
    """The name, if it is "auto" or that of an algorithm. Raises InvalidSchedule."""
    if schedule != "auto":
        algorithm(schedule)
    return schedule


def algorithm(schedule: str) -> Algorithm:
    """The function of a schedule's name. Raises InvalidSchedule."""
    found = ALGORITHMS.get(schedule)
    if found is None:
        raise InvalidSchedule(
            f"There is no schedule {schedule!r}: use one of {', '.join(sorted(ALGORITHMS))}, or 'auto'."
        )
    return found


def chain(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """Pipelined chain; ``blocks`` parts of K, at least 1 (more than K are K)."""
    return _levels(link, state, log_decay, boundary, blocks, [range(link.world_size)])


def tree(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """Log-depth scan; ``blocks`` means nothing here."""
    alone = [range(rank, rank + 1) for rank in range(link.world_size)]
    return _levels(link, state, log_decay, boundary, 1, alone)


def two_level(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """Chains in ``blocks`` parts inside of the hosts (``link.hosts``), a tree between them.

    A host here is a run of neighbouring ranks on one host: ranks that lie in turn on two hosts make runs of one
    rank each, and this is the tree.
    """
    return _levels(link, state, log_decay, boundary, blocks, runs(link.hosts))


def ring(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """The chain without a pipeline; ``blocks`` means nothing here."""
    return chain(link, state, log_decay, boundary, 1)


def gather(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """All-gather, then a fold of the ranks before this one; ``blocks`` means nothing here.

    Only the first rank knows the boundary: it folds it into the state that it gives.
    """
    given = state
    if link.rank == 0 and boundary is not None:
        given = _start_value(state, boundary)
        _advance(given, state, log_decay)
    pairs = link.all_gather(torch.cat((given.flatten(), log_decay.flatten())))
    state_in = _start_value(state, boundary if link.rank == 0 else None)
    for rank in range(link.rank):
        earlier, decay = pairs[rank].split((state.numel(), log_decay.numel()))
        _advance(state_in, earlier.view_as(state), decay.view_as(log_decay))
    return state_in


def _levels(
    link: Link,
    state: Tensor,
    log_decay: Tensor,
    boundary: Tensor | None,
    blocks: int,
    hosts: Sequence[range],
) -> Tensor:
    """A chain inside of each host, a tree between the hosts; ``hosts`` are neighbouring ranks, in order.

    1. Each host chains its ranks from a zero state; the first host begins with the boundary, so what its ranks
       get is final. The others' ranks also get the decay since their host's first token.
    2. A host's last rank sends the host's total to the next host's first rank, and the first ranks of all hosts
       but the first scan these inclusively.
    3. Each first rank sends what it has now, the state that comes into its host, down the host.
    """
    number = next(number for number, host in enumerate(hosts) if link.rank in host)
    host = hosts[number]
    before = link.rank - 1 if link.rank > host.start else None
    after = link.rank + 1 if link.rank + 1 < host.stop else None
    cuts = _cuts(state.shape[2], blocks)
    decay = log_decay.exp().unsqueeze(-1)

    entering = boundary if link.rank == 0 else None
    state_in = _start_value(state, entering) if before is None else torch.empty_like(state)
    decay_in = torch.zeros_like(log_decay)

    def updated(rows: slice) -> Tensor:
        part = decay if decay.shape[2] == 1 else decay[:, :, rows]
        return torch.addcmul(state[:, :, rows], part, state_in[:, :, rows])

    decays = None if number == 0 else (decay_in, log_decay)
    _pass_on(link, cuts, before, after, state_in, updated, decays)
    if len(hosts) == 1:
        return state_in

    total = updated(slice(None)) if after is None else state
    into_host, into_host_decay = _hop(
        link,
        total.contiguous(),
        decay_in + log_decay,
        to=hosts[number + 1].start if after is None and number + 1 < len(hosts) else None,
        source=hosts[number - 1].stop - 1 if before is None and number > 0 else None,
        send_decay=number > 0,
        receive_decay=number > 1,
    )
    if number == 0:
        return state_in
    if before is None:
        firsts = [each.start for each in hosts[1:]]
        into_host = _scan_inclusively(link, into_host, into_host_decay, firsts, number - 1)
    _pass_on(link, cuts, before, after, into_host, lambda rows: into_host[:, :, rows])
    if before is None:
        return into_host
    return torch.addcmul(state_in, decay_in.exp().unsqueeze(-1), into_host)


def _pass_on(
    link: Link,
    cuts: Sequence[slice],
    before: int | None,
    after: int | None,
    state_in: Tensor,
    outgoing: Callable[[slice], Tensor],
    decays: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Block by block: rows of ``state_in`` from the rank before, and ``outgoing(rows)`` to the rank after.

    With ``decays`` = (sum before this rank, this rank's own) the first comes along with the first block, and the
    sum of the two goes on with it.
    """
    inbox = []
    transfer: Transfer | None = None
    if before is not None:
        inbox = [
            torch.empty_like(state_in[:, :, rows], memory_format=torch.contiguous_format) for rows in cuts
        ]
        along = [] if decays is None else [(before, decays[0])]
        transfer = link.post(receives=[(before, inbox[0]), *along])
    for number, rows in enumerate(cuts):
        if transfer is not None:
            transfer.wait()
        if before is not None:
            state_in[:, :, rows] = inbox[number]
        sends, receives = [], []
        if after is not None:
            sends.append((after, outgoing(rows).contiguous()))
            if number == 0 and decays is not None:
                sends.append((after, decays[0] + decays[1]))
        if before is not None and number + 1 < len(cuts):
            receives.append((before, inbox[number + 1]))
        transfer = link.post(sends, receives)
    if transfer is not None:
        transfer.wait()
    link.flush()


def _scan_inclusively(
    link: Link, state: Tensor, log_decay: Tensor, ranks: Sequence[int], place: int
) -> Tensor:
    """Hillis and Steele over ``ranks``, of which this one is ``ranks[place]``: partners at distance 1, 2, 4, ...

    A sum that reaches back to ``ranks[0]`` is complete: it multiplies nothing any more, so its decay need not
    travel.
    """
    distance = 1
    while distance < len(ranks):
        earlier = place - distance
        arrived, arrived_decay = _hop(
            link,
            state,
            log_decay,
            to=ranks[place + distance] if place + distance < len(ranks) else None,
            source=ranks[earlier] if earlier >= 0 else None,
            send_decay=earlier >= 0,
            receive_decay=earlier >= distance,
        )
        if earlier >= 0:
            state = torch.addcmul(state, log_decay.exp().unsqueeze(-1), arrived)
            log_decay = log_decay + arrived_decay
        distance *= 2
    return state


def _hop(
    link: Link,
    state: Tensor,
    log_decay: Tensor,
    *,
    to: int | None,
    source: int | None,
    send_decay: bool = True,
    receive_decay: bool = True,
) -> tuple[Tensor, Tensor]:
    """Send (state, log_decay) to one rank and receive the same from another; zeros where nothing comes."""
    arrived = torch.zeros_like(state), torch.zeros_like(log_decay)
    sends = [] if to is None else [(to, state), *([(to, log_decay)] if send_decay else [])]
    receives = []
    if source is not None:
        receives = [(source, arrived[0]), *([(source, arrived[1])] if receive_decay else [])]
    link.post(sends, receives).wait()
    link.flush()
    return arrived


def _start_value(state: Tensor, boundary: Tensor | None) -> Tensor:
    return torch.zeros_like(state) if boundary is None else boundary.to(state.dtype, copy=True)


def _advance(state_in: Tensor, state: Tensor, log_decay: Tensor) -> None:
    """In place: from the state before a rank to the state after it."""
    state_in.mul_(log_decay.exp().unsqueeze(-1)).add_(state)


def _cuts(key_dim: int, blocks: int) -> list[slice]:
    """Parts of nearly equal size; never an empty one."""
    count = max(1, min(blocks, key_dim))
    edges = [number * key_dim // count for number in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


ALGORITHMS: dict[str, Algorithm] = {
    "all_scan": chain,
    "all_scan_tree": tree,
    "two_level": two_level,
    "lasp1": ring,
    "lasp2": gather,
}
