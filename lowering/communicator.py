"""A communicator of our own for each process group that a compiled graph names.

A graph refers to the user's group by name. The first op that needs it makes, on every rank of the group, a
second group with the same ranks for our transfers only, so that they cannot interleave with the user's
collectives. Nothing is made at import or at compile time: a warm cache may skip both.

Two wires:

gloo (tensors on the CPU)
    One worker thread a communicator runs its jobs first in, first out, so that a scan moves on while the
    caller computes. All ranks submit in the same order, as for any collective.
NCCL (tensors on CUDA)
    A job is enqueued at once on a high-priority side stream; waiting for it makes the current stream wait.
    The host does not wait, so a neighbour that is lost later shows as NCCL's own error, which PyTorch's
    watchdog raises after the group's timeout; over gloo it is a NeighbourLost from the wait.

CUDA tensors of a group whose CUDA backend is gloo are staged through the CPU (:meth:`Communicator.to_wire`).

Ranks are ranks of the group everywhere; ``global_ranks`` maps them to ranks of the world.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeco_compile.lowering import cost_model, links, op_log, torch_private, volume
from zeco_compile.lowering.errors import CommunicatorUnavailable, NeighbourLost
from zeco_compile.lowering.groups import first_line, group_named
from zeco_compile.lowering.jobs import Job, StreamJob, WorkerJob, work_through

T = TypeVar("T")
Peer = tuple[int, torch.Tensor]
"""(rank at the other end, contiguous tensor)"""


def communicator_for(group: str, device: torch.device) -> Communicator:
    """The data communicator of the group for tensors on ``device``; made on first use.

    The first use must come on every rank of the group (it connects them). Raises GroupNotFound,
    CommunicatorUnavailable.
    """
    wire = wire_of(group, device)
    return _registry.get(group, wire, "data", device)


def wire_of(group: str, device: torch.device) -> str:
    """Over what tensors on ``device`` travel in that group: "gloo" or "nccl". Makes nothing.

    For ``""`` what an ordinary group would use. Raises GroupNotFound, CommunicatorUnavailable.
    """
    if group == "":
        return "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu":
        return "gloo"
    if device.type != "cuda":
        raise CommunicatorUnavailable(
            f"The All-Scan runs on CPU and CUDA tensors, and got one on {device}. Move the model there."
        )
    wire = torch_private.backend_names(group_named(group)).get("cuda", "gloo")
    if wire not in ("gloo", "nccl"):
        raise CommunicatorUnavailable(
            f"The process group {group!r} uses the backend {wire!r} for CUDA tensors, and the All-Scan "
            "runs over NCCL or gloo only. Make the group with backend='nccl', or pass another group "
            "in torch.compile's options."
        )
    return wire


def control_communicator(group: str) -> Communicator:
    """A gloo communicator of the group for small agreements on the CPU, apart from the data's; made lazily.

    For groups on NCCL too. The first use must come on every rank of the group.
    """
    return _registry.get(group, "gloo", "control", torch.device("cpu"))


def close_all() -> None:
    """Stop the workers and drop every communicator. In-flight jobs fail. Runs at exit too."""
    _registry.close_all()


class Transfer:
    """Sends and receives that were posted together."""

    def __init__(self, link: Link, receives: list[tuple[int, Any]]) -> None:
        self._link = link
        self._receives = receives

    def wait(self) -> None:
        """Until what was to be received is there (NCCL: for the current stream, and sends count too)."""
        self._link._finish(self._receives, "receiving from")


class Link:
    """The transfers of one job: point-to-point and collectives among the ranks of the group.

    With ``reverse`` the ranks are counted from the end, so that an algorithm written for the forward
    direction runs backwards. Tensors must be contiguous and on the wire's device; any dtype.
    Every transfer counts its bytes under the job's label and raises NeighbourLost.
    """

    def __init__(self, communicator: Communicator, label: str, operation: str, reverse: bool) -> None:
        self._communicator = communicator
        self._label = label
        self._operation = operation
        self._reverse = reverse
        self._sends: list[tuple[int, Any]] = []
        self._open: list[list[tuple[int, Any]]] = [self._sends]
        self.world_size = communicator.world_size
        self.rank = self._mapped(communicator.rank)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank (equal numbers: the same host), in the order of the link's ranks."""
        hosts = self._communicator.links.hosts
        return hosts[::-1] if self._reverse else hosts

    def _mapped(self, rank: int) -> int:
        return self.world_size - 1 - rank if self._reverse else rank

    def _wire_rank(self, peer: int) -> int:
        return self._communicator.wire_rank(self._mapped(peer))

    def post(self, sends: Sequence[Peer] = (), receives: Sequence[Peer] = ()) -> Transfer:
        """Start sends and receives together. Call ``wait`` on the result before reading what came.

        Sent tensors must stay unchanged until :meth:`flush`. Between two ranks, tensors arrive in the order
        in which they were sent.
        """
        communicator = self._communicator
        for peer, tensor in sends:
            self._check(peer, tensor)
            volume.count(self._label, tensor.nbytes)
            communicator.bytes_sent += tensor.nbytes
        for peer, tensor in receives:
            self._check(peer, tensor)
        if communicator.wire == "nccl":
            return self._post_coalesced(sends, receives)
        # a tag for each direction, so that a forward and a reverse scan cannot take each other's blocks
        tag = int(self._reverse)
        incoming: list[tuple[int, Any]] = []
        self._open.append(incoming)
        for peer, tensor in receives:
            incoming.append((peer, self._launch(torch_private.receive, tensor, peer, tag, "receiving from")))
        for peer, tensor in sends:
            self._sends.append((peer, self._launch(torch_private.send, tensor, peer, tag, "sending to")))
        return Transfer(self, incoming)

    def _launch(self, start: Callable, tensor: torch.Tensor, peer: int, tag: int, direction: str) -> Any:
        try:
            return start(self._communicator.pg, _bytes(tensor), self._wire_rank(peer), tag)
        except NeighbourLost:
            raise
        except RuntimeError as error:
            cause = first_line(error)
        raise self._lost(direction, peer, cause)

    def _post_coalesced(self, sends: Sequence[Peer], receives: Sequence[Peer]) -> Transfer:
        peers = [*receives, *sends]
        if not peers:
            return Transfer(self, [])
        group = self._communicator.pg
        device = peers[0][1].device
        torch_private.start_coalescing(group, device)
        for peer, tensor in receives:
            torch_private.receive(group, _bytes(tensor), self._wire_rank(peer), 0)
        for peer, tensor in sends:
            torch_private.send(group, _bytes(tensor), self._wire_rank(peer), 0)
        work = torch_private.end_coalescing(group, device)
        return Transfer(self, [(peers[0][0], work)])

    def _check(self, peer: int, tensor: torch.Tensor) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ValueError(f"rank {peer} is no peer of rank {self.rank} in a group of {self.world_size}")
        if not tensor.is_contiguous():
            raise ValueError("only contiguous tensors can be sent; call .contiguous() first")

    def flush(self) -> None:
        """Until everything that was sent has left (NCCL: nothing to do, ``Transfer.wait`` covers sends)."""
        self._finish(self._sends, "sending to")

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place over the ranks, equal everywhere; ``op`` is "sum" or "max". Returns ``tensor``."""
        # a ring sends each element about twice
        self._collective_bytes(2 * tensor.nbytes * (self.world_size - 1) // self.world_size)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        numbers = torch.view_as_real(tensor) if tensor.is_complex() and op == "sum" else tensor
        self._collective(torch_private.all_reduce, numbers, reduce_op)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[world_size, *tensor.shape], in the order of the link's ranks."""
        self._collective_bytes(tensor.nbytes * (self.world_size - 1))
        output = tensor.new_empty((self.world_size, *tensor.shape))
        self._collective(_gather_bytes, output, tensor)
        return output.flip(0) if self._reverse else output

    def broadcast(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's tensor, in place on the other ranks. Returns ``tensor``."""
        if self.rank == owner:
            self._collective_bytes(tensor.nbytes * (self.world_size - 1))
        return self._collective(_broadcast_bytes, tensor, self._wire_rank(owner))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of ``tensor[p]``, on rank p; ``tensor`` is [world_size, ...].

        Added up in the order of the ranks, so the same on every wire.
        """
        mine = self.rank
        if self.world_size == 1:
            return tensor[0].clone()
        others = [peer for peer in range(self.world_size) if peer != mine]
        parts = {peer: torch.empty_like(tensor[mine]) for peer in others}
        transfer = self.post(
            [(peer, tensor[peer].contiguous()) for peer in others], [(peer, parts[peer]) for peer in others]
        )
        transfer.wait()
        self.flush()
        parts[mine] = tensor[mine]
        total = parts[0].clone()
        for peer in range(1, self.world_size):
            total += parts[peer]
        return total

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, whatever their lengths (gloo only)."""
        lengths = self.all_gather(torch.tensor([len(payload)], dtype=torch.int64)).flatten().tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self.all_gather(padded)
        return [bytes(rows[peer, :length].tolist()) for peer, length in enumerate(lengths)]

    def _collective_bytes(self, amount: int) -> None:
        volume.count(self._label, amount)
        self._communicator.bytes_sent += amount

    def _collective(self, start: Callable, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        try:
            pending = [(None, start(self._communicator.pg, tensor, *args))]
        except NeighbourLost:
            raise
        except RuntimeError as error:
            cause = first_line(error)
        else:
            self._finish(pending, "exchanging with")
            return tensor
        raise self._lost("exchanging with", None, cause)

    def _finish(self, pending: list, direction: str) -> None:
        """Wait for the (peer, work) pairs in turn, emptying the list."""
        while pending:
            peer, work = pending.pop(0)
            try:
                if self._communicator.wire == "nccl":
                    work.wait()  # for the current stream; the host goes on
                else:
                    work.wait(self._communicator.timeout)
                continue
            except RuntimeError as error:
                cause = first_line(error)
            # A work holds on to the connection, which has to close for the next rank to notice. The
            # traceback keeps the frames alive, so they must not keep the works.
            del work
            pending.clear()
            raise self._lost(direction, peer, cause)

    def _lost(self, direction: str, peer: int | None, cause: str) -> NeighbourLost:
        communicator = self._communicator
        for works in self._open:
            works.clear()
        neighbour = None if peer is None else self._mapped(peer)
        error = NeighbourLost(
            self._operation,
            rank=communicator.rank,
            direction=direction,
            neighbour=neighbour,
            neighbour_global=None if neighbour is None else communicator.global_ranks[neighbour],
            cause=cause,
        )
        communicator.fail(error)
        return error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: a transport then needs to know no dtypes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _gather_bytes(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> Any:
    return torch_private.all_gather(group, _bytes(output), _bytes(tensor))


def _broadcast_bytes(group: Any, tensor: torch.Tensor, owner: int) -> Any:
    return torch_private.broadcast(group, _bytes(tensor), owner)


class Communicator:
    """Transfers among the ranks of one group, over one wire. Get one from :func:`communicator_for`.

    ``group`` the user's group's name; ``rank``, ``world_size``, ``global_ranks`` as in :class:`Members`;
    ``wire`` "gloo" or "nccl"; ``links`` what connects the ranks; ``timeout`` the user's group's; ``bytes_sent``
    so far.
    """

    def __init__(
        self, group: str, wire: str, purpose: str, device: torch.device, parent: dist.ProcessGroup, count: int
    ) -> None:
        self.group = group
        self.wire = wire
        self.purpose = purpose
        self.rank = parent.rank()
        self.world_size = parent.size()
        self.global_ranks = tuple(dist.get_process_group_ranks(parent))
        self.links = links.of_group(group)
        self.timeout: timedelta = torch_private.group_timeout(parent)
        self.bytes_sent = 0
        self.device = torch.device("cpu") if wire == "gloo" else device
        self._jobs_made = 0
        self._error: NeighbourLost | None = None
        self._queue: queue.SimpleQueue[WorkerJob | None] | None = None
        self._side: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._pg: dist.ProcessGroup | None = self._connect(count)

    def _connect(self, count: int) -> dist.ProcessGroup:
        # the count keeps a group that is destroyed and made again under the same name from meeting old keys
        name = f"zeco_compile/{self.group}/{self.wire}/{self.purpose}/{count}"
        try:
            store = dist.PrefixStore(name, torch_private.default_store())
            if self.wire == "gloo":
                return torch_private.make_gloo_group(store, self.rank, self.world_size, self.timeout)
            group = torch_private.make_nccl_group(
                store, self.rank, self.world_size, self.timeout, self.global_ranks, name
            )
            # NCCL connects at the first collective, in which every rank must take part
            probe = torch.zeros(1, device=self.device)
            torch_private.all_reduce(group, probe, dist.ReduceOp.SUM).wait()
            return group
        except RuntimeError as error:
            raise CommunicatorUnavailable(
                f"Could not connect the {self.world_size} ranks {list(self.global_ranks)} of the process "
                f"group {self.group!r} over {self.wire} (this is group rank {self.rank}). Every rank of the "
                "group has to call the compiled model; one of them probably ended, or never got here within "
                f"the group's timeout of {self.timeout.total_seconds():g} s. "
                f"PyTorch said: {first_line(error)}"
            ) from error

    @property
    def pg(self) -> dist.ProcessGroup:
        """Our own process group; c10d's functions that take a group do not know it. Raises NeighbourLost."""
        if self._pg is None:
            raise self._again()
        return self._pg

    def wire_rank(self, rank: int) -> int:
        """The rank in :attr:`pg` of a rank of the group: they are the same."""
        return rank

    def plan(
        self, state: torch.Tensor, log_decay: torch.Tensor, schedule: str, blocks: int
    ) -> cost_model.Plan:
        """How a scan of these goes over this wire; the same on every rank for the same sizes."""
        costs = self.links.costs[self.wire]
        return cost_model.plan(
            costs, self.links.hosts, state.nbytes, log_decay.nbytes, state.shape[2], schedule, blocks
        )

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor on the wire's device; on the CPU a copy, so that the caller may reuse his."""
        tensor = tensor.detach().resolve_conj().resolve_neg()  # what is sent are the bytes in memory
        if self.wire == "nccl":
            return tensor.contiguous()
        return tensor.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def from_wire(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What came over the wire, on the device where the caller wants it."""
        return tensor if tensor.device == device else tensor.to(device)

    def submit(
        self,
        label: str,
        work: Callable[[Link], T],
        *,
        reverse: bool = False,
        reads: Sequence[torch.Tensor] = (),
    ) -> Job[T]:
        """Start ``work(link)`` without waiting for it.

        On gloo it runs in the worker thread, after the jobs before it. On NCCL it runs now, in this thread,
        on the side stream: it may only enqueue; ``reads`` are the tensors of the current stream it uses.
        ``label`` says in errors and in the byte counters what this is. Raises NeighbourLost if this
        communicator lost a neighbour before.
        """
        link = self._link(label, reverse)
        if self.wire == "nccl":
            return self.enqueue(lambda: work(link), reads)

        def run() -> T:
            try:
                with torch.no_grad():
                    result = work(link)
                    link.flush()
                op_log.record(f"{label} done")
                return result
            finally:
                link._sends.clear()

        job: WorkerJob[T] = WorkerJob(run)
        with self._lock:
            if self._error is not None:
                raise self._again()
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                threading.Thread(
                    target=work_through,
                    args=(self._queue,),
                    name=f"zeco {self.purpose} {self.group}",
                    daemon=True,
                ).start()
            self._queue.put(job)
        return job

    def run(self, label: str, work: Callable[[Link], T], *, reverse: bool = False) -> T:
        """``work(link)``, and wait for it (on NCCL: enqueued on the current stream).

        In order with submitted jobs, so on gloo after those in flight.
        """
        if self.wire == "nccl":
            with torch.no_grad():
                return work(self._link(label, reverse))
        return self.submit(label, work, reverse=reverse).wait()

    def fail(self, error: NeighbourLost) -> None:
        """A neighbour is lost: refuse all that comes, and close the connections so that the others notice."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._pg = None

    def close(self) -> None:
        """Stop the worker and let go of the process group."""
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
                self._queue = None
            group, self._pg = self._pg, None
            if self._error is None:
                self._error = NeighbourLost(
                    f"a communicator of the group {self.group!r} that was closed",
                    rank=self.rank,
                    direction="exchanging with",
                    neighbour=None,
                    neighbour_global=None,
                    cause="closed by this process",
                )
        if group is not None and self.wire == "nccl":
            torch_private.abort(group)

    def _again(self) -> NeighbourLost:
        assert self._error is not None
        first = self._error
        return NeighbourLost(
            first.operation,
            rank=first.rank,
            direction=first.direction,
            neighbour=first.neighbour,
            neighbour_global=first.neighbour_global,
            cause=first.cause,
        )

    def _link(self, label: str, reverse: bool) -> Link:
        with self._lock:
            number, self._jobs_made = self._jobs_made, self._jobs_made + 1
        operation = f"{label} (transfer number {number} of process group {self.group!r} over {self.wire})"
        return Link(self, label, operation, reverse)

    def enqueue(self, work: Callable[[], T], reads: Sequence[torch.Tensor]) -> Job[T]:
        """``work()`` on the side stream, which goes on from where the current stream is; for CUDA devices.

        It may only enqueue. ``reads`` are the tensors of the current stream that it uses.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side), torch.no_grad():
            result = work()
            event = torch.cuda.Event()
            event.record(side)
        for tensor in reads:
            # if the job is dropped without a wait, the memory still must not be reused before side is through
            tensor.record_stream(side)
        return StreamJob(result, event, self.device, reads)


class _Registry:
    """Communicators by group, wire and purpose. An entry serves while the user's group is the same one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str, str, int], tuple[dist.ProcessGroup, Communicator]] = {}
        self._made: dict[tuple[str, str, str], int] = {}
        self._at_exit = False

    def get(self, group: str, wire: str, purpose: str, device: torch.device) -> Communicator:
        parent = group_named(group)
        index = 0
        if device.type == "cuda" and wire == "nccl":
            index = torch.cuda.current_device() if device.index is None else device.index
            device = torch.device("cuda", index)
        key = (group, wire, purpose, index)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is parent:
                return entry[1]
            if entry is not None:
                entry[1].close()
                del self._entries[key]
            count = self._made.get(key[:3], 0)
            self._made[key[:3]] = count + 1
            made = Communicator(group, wire, purpose, device, parent, count)
            self._entries[key] = (parent, made)
            if not self._at_exit:
                atexit.register(self.close_all)
                self._at_exit = True
            return made

    def close_all(self) -> None:
        with self._lock:
            entries, self._entries = self._entries, {}
        for _, communicator in entries.values():
            communicator.close()


_registry = _Registry()
