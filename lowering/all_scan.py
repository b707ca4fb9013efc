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

states [B, H, K, V], log_decay [B, H, K] or [B, H, 1], all in one dtype, contiguous, on the wire's device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from zeco_compile.lowering.communicator import Link, Transfer
from zeco_compile.lowering.errors import InvalidSchedule

Algorithm = Callable[[Link, Tensor, Tensor, Tensor | None, int], Tensor]
"""(link, state, log_decay, boundary, blocks) -> S_in [B, H, K, V], fresh and contiguous."""

# A block smaller than this costs more in latency than its earlier departure saves.
_SMALLEST_BLOCK_BYTES = 256 * 1024
_MOST_BLOCKS = 8


def resolve_schedule(schedule: str) -> str:
    """The schedule that runs for what the user asked: "auto" is "all_scan". Call it before the op is made.

    Raises InvalidSchedule for a name that does not exist.
    """
    if schedule == "auto":
        return "all_scan"
    algorithm(schedule)
    return schedule


def default_blocks(state_bytes: int, key_dim: int, world_size: int) -> int:
    """Pipeline blocks when the user names none: 1 for two ranks (there is no middle rank to overlap), else as
    many as leave a block of 256 KiB, at most 8 and at most K."""
    if world_size <= 2:
        return 1
    return max(1, min(_MOST_BLOCKS, key_dim, state_bytes // _SMALLEST_BLOCK_BYTES))


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
    rank, last = link.rank, link.world_size - 1
    state_in = _start_value(state, boundary) if rank == 0 else torch.empty_like(state)
    cuts = _cuts(state.shape[2], blocks)
    decay = log_decay.exp().unsqueeze(-1)
    inbox = [torch.empty_like(state[:, :, rows], memory_format=torch.contiguous_format) for rows in cuts]
    transfer: Transfer | None = None
    if rank > 0:
        transfer = link.post(receives=[(rank - 1, inbox[0])])
    for number, rows in enumerate(cuts):
        if transfer is not None:
            transfer.wait()
        if rank > 0:
            state_in[:, :, rows] = inbox[number]
        sends, receives = [], []
        if rank < last:
            part = decay if decay.shape[2] == 1 else decay[:, :, rows]
            updated = torch.addcmul(state[:, :, rows], part, state_in[:, :, rows])
            sends.append((rank + 1, updated.contiguous()))
        if rank > 0 and number + 1 < len(cuts):
            receives.append((rank - 1, inbox[number + 1]))
        transfer = link.post(sends, receives)
    if transfer is not None:
        transfer.wait()
    link.flush()
    return state_in


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


def tree(link: Link, state: Tensor, log_decay: Tensor, boundary: Tensor | None, blocks: int) -> Tensor:
    """Log-depth scan; ``blocks`` means nothing here.

    The boundary is folded into the first rank's state, and everything moves on by one rank; what then stands
    on ranks 1 .. P-1 is scanned inclusively. A rank's sum that reaches back to the first rank is complete:
    it multiplies nothing any more, so its decay need not travel.
    """
    rank, last = link.rank, link.world_size - 1
    if rank == 0:
        state_out = _start_value(state, boundary)
        _advance(state_out, state, log_decay)
        _hop(link, state_out, log_decay, to=1 if last > 0 else None, source=None, send_decay=False)
        return _start_value(state, boundary)
    to = rank + 1 if rank < last else None
    state_in, decay = _hop(link, state, log_decay, to=to, source=rank - 1, receive_decay=rank > 1)
    distance = 1
    while distance < last:
        to = rank + distance if rank + distance <= last else None
        source = rank - distance if rank > distance else None
        earlier, earlier_decay = _hop(
            link,
            state_in,
            decay,
            to=to,
            source=source,
            send_decay=rank > distance,
            receive_decay=source is not None and source > distance,
        )
        if source is not None:
            state_in = torch.addcmul(state_in, decay.exp().unsqueeze(-1), earlier)
            decay = decay + earlier_decay
        distance *= 2
    return state_in


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
    receives = [] if source is None else [(source, arrived[0])]
    if source is not None and receive_decay:
        receives.append((source, arrived[1]))
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
    "lasp1": ring,
    "lasp2": gather,
}
