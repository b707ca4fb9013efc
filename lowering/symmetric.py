"""All-Scan through memory that the GPUs of one host share: a kernel a rank (``kernels/triton_scan.py``), no library.

A rank stores its updated state block by block into the next rank's inbox; the next rank's kernel, launched at any time,
waits on its own device for the numbers to be there. Where the ranks of a group are not all on one host, or two share a
GPU, or ZECO_SYMMETRIC_MEMORY=0 is set on one of them, the same scan runs over NCCL: the ranks compare notes once and
all decide alike.

A rank that waits longer than the group's timeout writes so into memory that the host reads, and goes on with NaN, in
all its scans from then on; the next scan or wait on that rank raises NeighbourLost. Nothing synchronises while all is
well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeco_compile.kernels.devices import triton_available
from zeco_compile.lowering import torch_private, volume
from zeco_compile.lowering.communicator import Communicator, communicator_for, control_communicator
from zeco_compile.lowering.errors import CommunicatorUnavailable, NeighbourLost
from zeco_compile.lowering.jobs import Job

SWITCH = "ZECO_SYMMETRIC_MEMORY"
# What a chain through shared memory may serve; the others have their own pattern of messages.
SCHEDULES = ("auto", "all_scan")
# States that a rank may be ahead of the next one; once in so many it asks how far that one is.
SLOTS = 4
# Elements of a tile: 8 KiB of float32, which is on its way while the next one is computed.
_TILE = 2048
# Programs of a hop, of 4 warps: enough to fill a link, few enough to leave most of the chip to what runs beside it.
_PROGRAMS = 256
# Programs that an H200 holds at once, and a few to spare: more, and one that waits keeps out what it waits for.
_RESIDENT = 896
_WARPS = 4
_ALIGNMENT = 256


@dataclass(frozen=True)
class Shape:
    """What a chain is made for: states of ``rows`` (B*H*K) by ``value``, whose decay is one for ``per_decay`` rows."""

    rows: int
    value: int
    per_decay: int
    dtype: torch.dtype

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile; powers of two."""
        columns = 1 << (self.value - 1).bit_length()
        return max(1, _TILE // columns), columns

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile[0])

    @property
    def state_bytes(self) -> int:
        return self.rows * self.value * self.dtype.itemsize

    @property
    def memory(self) -> int:
        """Bytes of one direction's memory on a rank."""
        return _aligned(SLOTS * self.state_bytes) + _aligned(4 * self.tiles) + _ALIGNMENT


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Mailbox:
    """One direction's memory on one rank, which its neighbours read and write: views of ``memory``, uint8, to be
    cleared first. Layout: the inbox, as integers, the counters of what was taken, and a mark that something failed."""

    def __init__(self, shape: Shape, memory: Tensor) -> None:
        inbox = SLOTS * shape.state_bytes
        start = _aligned(inbox)
        flags = start + _aligned(4 * shape.tiles)
        self.inbox = memory[:inbox].view(torch.int32 if shape.dtype.itemsize == 4 else torch.int64)
        self.taken = memory[start : start + 4 * shape.tiles].view(torch.int32)
        self.poison = memory[flags : flags + 4].view(torch.int32)

    def clear(self) -> None:
        """Nothing has come, nothing is taken, nothing failed."""
        from zeco_compile.kernels.triton_scan import ABSENT

        self.inbox.fill_(ABSENT)
        self.taken.zero_()
        self.poison.zero_()


class Hop:
    """One rank's part of a chain: its own mailbox, the next rank's where there is one, and where it is in time."""

    def __init__(
        self, shape: Shape, mine: Mailbox, following: Mailbox | None, failure: Tensor, *, first: bool,
        programs: int = _PROGRAMS,
    ) -> None:  # fmt: skip
        self.shape = shape
        self._programs = min(programs, shape.tiles)
        self._mine, self._next, self._failure, self._first = mine, following, failure, first
        device = mine.inbox.device
        self._epochs = torch.zeros(shape.tiles, dtype=torch.int32, device=device)
        self._known = torch.zeros_like(self._epochs)
        self._clocks = torch.zeros(shape.tiles, dtype=torch.int64, device=device)

    @property
    def has_next(self) -> bool:
        return self._next is not None

    def run(self, state: Tensor, log_decay: Tensor, boundary: Tensor | None, seconds: float) -> Tensor:
        """S_in like ``state`` [B, H, K, V]; enqueued on the current stream. Waits ``seconds`` for a neighbour."""
        from zeco_compile.kernels.triton_scan import scan_hop

        shape, mine = self.shape, self._mine
        after = mine if self._next is None else self._next
        state_in = torch.empty_like(state)
        rows, columns = shape.tile
        with _current(state.device):
            scan_hop[self._programs,](
                state, log_decay, boundary, state_in,
                mine.inbox, mine.taken, mine.poison, after.inbox, after.taken, after.poison,
                self._known, self._epochs, self._clocks, self._failure,
                shape.tiles, int(seconds * 1e9),
                ROWS=shape.rows, V=shape.value, PER_DECAY=shape.per_decay, BR=rows, BV=columns,
                FIRST=self._first, LAST=self._next is None, BOUNDARY=boundary is not None,
                SLOTS=SLOTS, TIMED=state.device.type == "cuda", num_warps=_WARPS,
            )  # fmt: skip
        return state_in


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton starts a kernel on the current device, whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def tiles_of(rows: int, value: int) -> int:
    """In how many parts a chain carries a state of ``rows`` (B*H*K) by ``value``."""
    return Shape(rows, value, 1, torch.float32).tiles


def shape_of(state: Tensor, log_decay: Tensor) -> Shape:
    batch, heads, key, value = state.shape
    return Shape(batch * heads * key, value, key if log_decay.shape[2] == 1 else 1, state.dtype)


class SymmetricScan:
    """The chains of a group on one device: one for each direction and shape of states, made on first use."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._hops: dict[tuple[bool, Shape], Hop] = {}
        # other ranks' memory is there as long as these are
        self._shared: list[Any] = []
        # read by the host at any time, written by the device when something fails
        self._failure = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def submit(
        self, label: str, state: Tensor, log_decay: Tensor, boundary: Tensor | None, *, reverse: bool
    ) -> Job[Tensor]:
        """Start a scan on the communicator's side stream; all contiguous. Raises NeighbourLost."""
        self.check(label)
        hop = self._hop(shape_of(state, log_decay), reverse)
        communicator = self._communicator
        if hop.has_next:
            volume.count(label, state.nbytes)
            communicator.bytes_sent += state.nbytes
        seconds = communicator.timeout.total_seconds()
        given = [state, log_decay, *([] if boundary is None else [boundary])]
        job = communicator.enqueue(lambda: hop.run(state, log_decay, boundary, seconds), given)
        return _Checked(job, functools.partial(self.check, label))

    def check(self, label: str) -> None:
        """Raises NeighbourLost if a scan that has run failed. Reads host memory; waits for nothing."""
        code = int(self._failure[0])
        if code == 0:
            return
        from zeco_compile.kernels import triton_scan

        communicator = self._communicator
        reverse = label.endswith("reverse")
        step = {triton_scan.NOTHING_TAKEN: 1}.get(code, -1) * (-1 if reverse else 1)
        neighbour = communicator.rank + step
        error = NeighbourLost(
            f"{label} (process group {communicator.group!r} over symmetric memory)",
            rank=communicator.rank,
            direction="sending to" if code == triton_scan.NOTHING_TAKEN else "receiving from",
            neighbour=neighbour,
            neighbour_global=communicator.global_ranks[neighbour],
            cause="it reported that a rank before it failed"
            if code == triton_scan.PASSED_ON
            else f"no sign of it within {communicator.timeout.total_seconds():g} s",
        )
        communicator.fail(error)
        raise error

    def _hop(self, shape: Shape, reverse: bool) -> Hop:
        found = self._hops.get((reverse, shape))
        if found is None:
            found = self._hops[reverse, shape] = self._connect(shape, reverse)
        return found

    def _connect(self, shape: Shape, reverse: bool) -> Hop:
        communicator = self._communicator
        refuse_capture(communicator.group)
        rank, step = communicator.rank, -1 if reverse else 1

        def prepare(memory: Tensor) -> None:
            Mailbox(shape, memory).clear()
            torch.cuda.synchronize(communicator.device)

        try:
            mine, of = torch_private.symmetric_memory(
                shape.memory, communicator.device, communicator.group, prepare
            )
        except RuntimeError as error:
            raise CommunicatorUnavailable(
                f"The ranks of the process group {communicator.group!r} are on one host, but could not share "
                f"{shape.memory} bytes of their GPUs' memory. Set {SWITCH}=0 to scan over NCCL instead. "
                f"PyTorch said: {str(error).splitlines()[0]}"
            ) from error
        self._shared.append((mine, of))
        following = of(rank + step) if 0 <= rank + step < communicator.world_size else None
        # nobody stores into memory that its owner has still to clear
        control_communicator(communicator.group).run("memory", lambda link: link.all_gather_bytes(b""))
        after = None if following is None else Mailbox(shape, following)
        first = not 0 <= rank - step < communicator.world_size
        return Hop(shape, Mailbox(shape, mine), after, self._failure, first=first)


class _Checked(Job[Tensor]):
    """A scan whose failure, if it is known by then, the wait raises."""

    def __init__(self, job: Job[Tensor], check: functools.partial[None]) -> None:
        self._job = job
        self._check = check

    def done(self) -> bool:
        return self._job.done()

    def wait(self) -> Tensor:
        self._check()
        return self._job.wait()


def refuse_capture(group: str) -> None:
    """Raises CommunicatorUnavailable while a CUDA graph is captured: what meets other ranks cannot be part of it."""
    if torch.cuda.is_current_stream_capturing():
        raise CommunicatorUnavailable(
            f"The first scan of its kind in the process group {group!r} came while a CUDA graph was captured, and "
            "connecting the ranks cannot be captured. Run one whole training step before the capture."
        )


# ----- which groups can


_lock = threading.Lock()
_scans: dict[tuple[str, torch.device], tuple[Communicator, SymmetricScan | None]] = {}


def scan_for(group: str, device: torch.device) -> SymmetricScan | None:
    """The scan through symmetric memory of that group, None where it cannot be; the first call is collective."""
    if device.type != "cuda" or not triton_available():
        return None
    communicator = communicator_for(group, device)
    if communicator.wire != "nccl":
        return None
    key = group, communicator.device
    with _lock:
        known = _scans.get(key)
        if known is None or known[0] is not communicator:
            refuse_capture(group)
            known = communicator, SymmetricScan(communicator) if _can_share(communicator) else None
            _scans[key] = known
        return known[1]


def _can_share(communicator: Communicator) -> bool:
    mine = {
        "device": str(torch.cuda.get_device_properties(communicator.device).uuid),
        "wanted": os.environ.get(SWITCH, "1") != "0",
    }
    payload = json.dumps(mine).encode()
    control = control_communicator(communicator.group)
    everyone = [
        json.loads(each)
        for each in control.run("symmetric memory", lambda link: link.all_gather_bytes(payload))
    ]
    devices = {each["device"] for each in everyone}
    one_host = len(set(communicator.links.hosts)) == 1
    return one_host and len(devices) == len(everyone) and all(each["wanted"] for each in everyone)


def expected_wire(wire: str, hosts: Sequence[int], schedule: str) -> str:
    """For a report: "symmetric" where ``wire`` is NCCL's and this rank knows no reason against it."""
    wanted = os.environ.get(SWITCH, "1") != "0" and triton_available()
    shared = wire == "nccl" and wanted and len(set(hosts)) == 1 and schedule in SCHEDULES
    return "symmetric" if shared else wire


def virtual_chain(devices: Sequence[torch.device], shape: Shape, failure: Tensor) -> Iterator[Hop]:
    """The hops of as many ranks as ``devices``, each on its own of these, which may be all the same.

    The same kernel and flags as between processes; a wire where neighbours' devices differ, which then must reach each
    other's memory. For tests and benchmarks.
    """
    boxes = [
        Mailbox(shape, torch.empty(shape.memory, dtype=torch.uint8, device=device)) for device in devices
    ]
    for box in boxes:
        box.clear()
    most = max(Counter(devices).values())
    for rank, box in enumerate(boxes):
        following = boxes[rank + 1] if rank < len(boxes) - 1 else None
        yield Hop(shape, box, following, failure, first=rank == 0, programs=min(_PROGRAMS, _RESIDENT // most))
