"""One hop of All-Scan in one Triton kernel: wait for the neighbour's block, update it, store it into the next rank's
memory.

A rank's state is cut into tiles of rows. The inbox has SLOTS places for a state, and an element that has not come holds
the pattern ABSENT: the numbers say themselves that they are there, and nothing on the way waits for a fence, or for a
flag behind it. Who has read them puts ABSENT back, and says so in a counter of its own memory at its next scan
(*taken*); a rank may be that many scans ahead of the next one. It looks over the wire what that one has taken only when
what it knows of it (``known``) does not do. A program finds in memory which scan it is in (``epochs``): nothing is set
back between scans by the host, nothing comes from it, and so a CUDA graph replays it.

Per rank and element of the state: read the rank's own and the one that came, write the one that came in (it is kept
for the backward), write ABSENT, store one over the wire: 5 * 4 bytes, 1 of the 5 over the wire; 3 FLOPs.
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


# An element of the inbox that has not come; a NaN, which is sent as the usual one of its width.
ABSENT = -1
_ABSENT: tl.constexpr = tl.constexpr(ABSENT)
_NAN32: tl.constexpr = tl.constexpr(0x7FC00000)
_NAN64: tl.constexpr = tl.constexpr(0x7FF8000000000000)


@triton.jit
def _time(clock):
    """Nanoseconds. An atomic's result is one for all threads of the program, as a time that each read would not be."""
    tl.atomic_xchg(clock, globaltimer(), sem="relaxed", scope="gpu")
    return tl.atomic_xchg(clock, globaltimer(), sem="relaxed", scope="gpu")


@triton.jit
def _counted(counter, wanted, clock, patience, TIMED: tl.constexpr):
    """The counter as soon as it is ``wanted`` or more, or after ``patience`` nanoseconds; at once in the interpreter,
    where programs run one after the other and no one else would count."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    if TIMED:  # noqa: SIM102 (the one is known when the kernel is compiled, the other when it runs)
        if seen < wanted:
            begin = _time(clock)
            now = begin
            looks = 0
            while (seen < wanted) & (now - begin < patience):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                looks += 1
                if looks % _LOOKS == 0:
                    now = _time(clock)
    return seen


@triton.jit
def _received(place, mask, poison, clock, patience, TIMED: tl.constexpr):
    """The patterns at ``place`` as soon as all are there, or after ``patience``, or once something before failed; how
    many are missing."""
    bits = tl.load(place, mask=mask, other=0, volatile=True)
    missing = tl.sum((bits == _ABSENT).to(tl.int32))
    if TIMED:  # noqa: SIM102
        if missing > 0:
            begin = _time(clock)
            now = begin
            looks = 0
            while (missing > 0) & (now - begin < patience):
                bits = tl.load(place, mask=mask, other=0, volatile=True)
                missing = tl.sum((bits == _ABSENT).to(tl.int32))
                looks += 1
                if looks % _LOOKS == 0:
                    now = _time(clock)
                    patience = tl.where(
                        tl.atomic_add(poison, 0, sem="relaxed", scope="sys") != 0, 0, patience
                    )
    return bits, missing


@triton.jit(do_not_specialize=["tiles", "patience"])
def scan_hop(
    state, log_decay, boundary, state_in,
    inbox, taken, poison, outbox, next_taken, next_poison, known, epochs, clocks, failure,
    tiles, patience,
    ROWS: tl.constexpr, V: tl.constexpr, PER_DECAY: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BOUNDARY: tl.constexpr, SLOTS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """state_in of this rank, and the next rank's arrival; one program every so many tiles.

    state, state_in [ROWS, V], log_decay [ROWS // PER_DECAY] (natural), boundary like state: what enters at the first
    rank. inbox, outbox [SLOTS, ROWS, V] as integers of the state's width; taken, known, epochs, clocks [tiles].
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
            room = tl.load(known + tile)
            mine = tl.load(state + at, mask=mask, other=0.0)
            decay = tl.exp(tl.load(log_decay + rows // PER_DECAY, mask=rows < ROWS, other=0.0))
        good = 1
        if FIRST:
            if BOUNDARY:
                value = tl.load(boundary + at, mask=mask, other=0.0)
            else:
                value = tl.zeros((BR, BV), state.dtype.element_ty)
        else:
            # What earlier scans took: their kernels are over, and with them what they wrote.
            tl.store(taken + tile, epoch)
            bits, missing = _received(inbox + slot + at, mask, poison, clocks + tile, left, TIMED)
            value = bits.to(state.dtype.element_ty, bitcast=True)
            # Once something failed here, what lies in the inbox may be of any scan.
            broken = tl.load(poison, volatile=True)
            good = ((missing == 0) & (broken == 0)).to(tl.int32)
            if broken == _FROM_BEFORE:
                tl.store(failure, _PASSED_ON)
            elif (broken == 0) & (missing > 0):
                tl.store(failure, _NOTHING_ARRIVED)
            if good == 0:
                tl.store(poison, _MINE)
                left = tl.zeros_like(left)
                # No number of the past may be taken for one of now. NaN by its bits: as a constant it is unequal to
                # itself, which Triton takes for a change of the program.
                value = _not_a_number(bits).to(state.dtype.element_ty, bitcast=True)
        if not LAST:
            sent = (mine + decay[:, None] * value).to(outbox.dtype.element_ty, bitcast=True)
            sent = tl.where(sent == _ABSENT, _not_a_number(sent), sent)
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
        tl.store(state_in + at, value, mask=mask)
        if not FIRST:
            # every thread has read its numbers
            tl.debug_barrier()
            tl.store(inbox + slot + at, tl.full((BR, BV), _ABSENT, inbox.dtype.element_ty), mask=mask)
        # every thread has read which scan this is
        tl.debug_barrier()
        tl.store(epochs + tile, epoch + 1)


@triton.jit
def _not_a_number(bits):
    """NaN, as patterns, in the shape and width of ``bits``."""
    return tl.full(bits.shape, _NAN32 if bits.dtype == tl.int32 else _NAN64, bits.dtype)
