"""One hop of All-Scan in one Triton kernel: wait for the neighbour's block, update it, store it into the next rank's
memory, raise that rank's flag.

A rank's state is cut into tiles of rows; each has, in the rank's own memory, a counter of the scans that have *arrived*
in it and of those that were *taken* out. Both only grow, and a program finds in memory which scan it is in
(``epochs``): nothing is set back between scans, nothing comes from the host, and so a CUDA graph replays it. The inbox
has SLOTS places for a state: a rank may be that many scans ahead of the next one. It looks over the wire what that one
has taken only when what it knows of it (``known``) does not do, once in SLOTS scans: nobody waits for an answer.

Per rank and element of the state: read the rank's own and the one that came, write the one that came in (it is kept
for the backward), store one over the wire: 4 * 4 bytes, 1 of the 4 over the wire; 3 FLOPs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# What a rank writes of itself into ``failure``: it waited in vain for a state, for the next one to make room; or the
# rank before it says that something before it failed.
NOTHING_ARRIVED, NOTHING_TAKEN, PASSED_ON = 1, 2, 3
_NOTHING_ARRIVED: tl.constexpr = tl.constexpr(NOTHING_ARRIVED)
_NOTHING_TAKEN: tl.constexpr = tl.constexpr(NOTHING_TAKEN)
_PASSED_ON: tl.constexpr = tl.constexpr(PASSED_ON)
# What ``poison`` holds: something failed on this rank, or on one before it.
_MINE, _FROM_BEFORE = tl.constexpr(1), tl.constexpr(2)


# Looks at a counter between two looks at the clock.
_LOOKS: tl.constexpr = tl.constexpr(32)


@triton.jit
def _counted(counter, wanted, clock, patience, TIMED: tl.constexpr):
    """The counter as soon as it is ``wanted`` or more, or after ``patience`` nanoseconds; at once in the interpreter,
    where programs run one after the other and no one else would count."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    if TIMED:  # noqa: SIM102 (the one is known when the kernel is compiled, the other when it runs)
        if seen < wanted:
            # An atomic's result is one for all threads of the program, as a time that each read itself would not be.
            tl.atomic_xchg(clock, globaltimer(), sem="relaxed", scope="gpu")
            begin = tl.atomic_xchg(clock, globaltimer(), sem="relaxed", scope="gpu")
            now = begin
            looks = 0
            while (seen < wanted) & (now - begin < patience):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                looks += 1
                if looks % _LOOKS == 0:
                    now = tl.atomic_xchg(clock, globaltimer(), sem="relaxed", scope="gpu")
    return seen


@triton.jit(do_not_specialize=["tiles", "patience"])
def scan_hop(
    state, log_decay, boundary, state_in,
    inbox, arrived, taken, poison, outbox, next_arrived, next_taken, next_poison, known, epochs, clocks, failure,
    tiles, patience,
    ROWS: tl.constexpr, V: tl.constexpr, PER_DECAY: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BOUNDARY: tl.constexpr, SLOTS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """state_in of this rank, and the next rank's arrival; one program every so many tiles.

    state, state_in [ROWS, V], log_decay [ROWS // PER_DECAY] (natural), boundary like state: what enters at the first
    rank. inbox, outbox [SLOTS, ROWS, V]; arrived, taken, known, epochs, clocks [tiles], the next rank's likewise.
    """
    # after a failure nothing is waited for again
    left = tl.where(tl.load(poison, volatile=True) != 0, 0, patience).to(tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = tile * BR + tl.arange(0, BR)
        columns = tl.arange(0, BV)
        mask = (rows < ROWS)[:, None] & (columns < V)[None, :]
        at = rows.to(tl.int64)[:, None] * V + columns[None, :]
        epoch = tl.load(epochs + tile)
        size = tl.cast(ROWS, tl.int64) * V
        slot = (epoch % SLOTS) * size
        if not LAST:
            mine = tl.load(state + at, mask=mask, other=0.0)
            decay = tl.exp(tl.load(log_decay + rows // PER_DECAY, mask=rows < ROWS, other=0.0))
        good = 1
        if FIRST:
            if BOUNDARY:
                value = tl.load(boundary + at, mask=mask, other=0.0)
            else:
                value = tl.zeros((BR, BV), state.dtype.element_ty)
        else:
            good = (_counted(arrived + tile, epoch + 1, clocks + tile, left, TIMED) > epoch).to(tl.int32)
            value = tl.load(inbox + slot + at, mask=mask, other=0.0, cache_modifier=".cg")
            if tl.load(poison, volatile=True) == _FROM_BEFORE:
                good = 0
                tl.store(failure, _PASSED_ON)
            elif good == 0:
                tl.store(failure, _NOTHING_ARRIVED)
            if good == 0:
                tl.store(poison, _MINE)
                left = tl.zeros_like(left)
            # No number of the past may be taken for one of now. NaN by its bits: as a constant it is unequal to itself,
            # which Triton takes for a change of the program.
            value = tl.where(good != 0, value, tl.full((), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True))
        if not LAST:
            sent = mine + decay[:, None] * value
            room = tl.load(known + tile)
            if room < epoch + 1 - SLOTS:
                room = _counted(next_taken + tile, epoch + 1 - SLOTS, clocks + tile, left, TIMED)
                tl.store(known + tile, room)
            if room < epoch + 1 - SLOTS:
                tl.store(failure, _NOTHING_TAKEN)
                good = 0
            else:
                tl.store(outbox + slot + at, sent, mask=mask)
            if good == 0:
                tl.store(next_poison, _FROM_BEFORE)
                tl.store(poison, _MINE)
                left = tl.zeros_like(left)
            # every thread's stores before the one that says so
            tl.debug_barrier()
            tl.atomic_xchg(next_arrived + tile, epoch + 1, sem="release", scope="sys")
        tl.store(state_in + at, value, mask=mask)
        if not FIRST:
            # every thread has its numbers
            tl.debug_barrier()
            tl.atomic_xchg(taken + tile, epoch + 1, sem="release", scope="sys")
        tl.store(epochs + tile, epoch + 1)
