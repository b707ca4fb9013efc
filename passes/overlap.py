"""Orders a graph so that the exchange of states between the ranks runs beside the computation.

Contract. Given a forward or backward graph after AOTAutograd (ATen and ``zeco`` ops, functional but for
copies into the inputs), `order_transfers` changes nothing but the order of the nodes, and afterwards, for
every pair of ``zeco::scan_start`` and ``zeco::scan_wait``:

- the start stands as early as its inputs allow within its stretch of the graph, from the last communication
  before it on: what it does not need comes after it;
- then comes the work that does not need the exchange: ``zeco::diagonal`` (on a GPU ``zeco::chunk_pairs``), or
  that of the backward;
  an exchange which that work needs (a halo of q, say) comes before the start, since behind it, on the same
  communicator, it would wait for the whole scan;
- the wait stands right before its first user.

Communications get one order, which depends on the graph alone: ranks with equal graphs (constants may differ)
submit them in the same order. A start stays behind the communication that it stood behind, where that is
waited for later too: independent layers get two exchanges in flight, not all, and a graph that recomputes its
activations layer by layer keeps doing so.

`pin_order` makes a compiler that schedules anew (Inductor) keep that: all communications in a chain, and
start, work, wait.

`OrderLost` is raised, and nothing is compiled, where the promise cannot be kept: a start without a wait, a
wait without a start, a pair whose work is not found while some work is left over, or work that would have to
stand after its own wait.

    order = nodes of the graph
    for every (start, wait, work), in the order of the starts:
        move the exchanges that the work needs, with what they need, before the start
        stretch = what lies between the last communication before the start, and the start
        move what the start does not need, out of the stretch, behind the start
        move the wait before its first user
    emit the nodes, always the first of `order` whose dependencies are out: inputs, start before work before
        wait, random numbers and the user's collectives as they were, reads and writes of mutated memory too
    move every wait before its first user again
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.lowering import attention, exchange, fused_attention, halo  # noqa: F401 (they register the ops below)
from zeco_compile.lowering.torch_private import storage_key
from zeco_compile.passes import torch_private
from zeco_compile.passes.errors import CompileError
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.schema import argument

_zeco = torch.ops.zeco
_START = _zeco.scan_start.default
_WAIT = _zeco.scan_wait.default
_WORK = (
    _zeco.diagonal.default,
    _zeco.diagonal_backward.default,
    _zeco.chunk_pairs.default,
    _zeco.chunk_pairs_backward.default,
)

# The op that joins the two halves: where its argument from the scan arrives, and the one from the work.
_JOINS = {
    _zeco.combine.default: ("state_in", "o"),
    _zeco.combine_backward.default: ("dstate_out", "dq"),
    _zeco.read_out.default: ("state_in", "pairs"),
    _zeco.read_out_backward.default: ("dstate_out", "dpairs"),
}

_aten = torch.ops.aten
_MATMULS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.convolution_backward)


class OrderLost(CompileError):
    """The graph does not allow, or no longer shows, that an exchange of states runs beside its work."""

    def __init__(self, found: str, node: fx.Node) -> None:
        self.node = node.name
        super().__init__(
            found,
            location=user_location(node),
            why="a lost order would make every layer wait for the exchange, or let two ranks wait for each "
            "other, without any other sign of it; so the compilation stops here.",
            hints=[
                'set options={"overlap": False} to leave the order to the code generator',
                "if graph passes of your own run (torch._inductor.config), let them leave the ops of the "
                "namespace zeco alone",
            ],
            context=[("graph node", node.name)],
        )


@dataclass(frozen=True)
class Transfer:
    """One exchange of states: started, waited for, and the ops that it runs beside (none in a graph that
    recomputes a state only)."""

    start: fx.Node
    wait: fx.Node
    work: tuple[fx.Node, ...]


def communicates(node: fx.Node) -> bool:
    """Whether the op talks to other ranks, or may: an op of ours that is given a group of more than one."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "zeco" and bool(argument(node, "group", ""))


def find_transfers(graph: fx.Graph) -> tuple[Transfer, ...]:
    """The exchanges of states in a graph, in the order of their starts. Raises `OrderLost`."""
    waits: dict[fx.Node, list[fx.Node]] = {}
    for wait in _calls(graph, _WAIT):
        start = argument(wait, "in_flight")
        if not isinstance(start, fx.Node) or start.target is not _START:
            raise OrderLost("zeco::scan_wait waits for an exchange that this graph does not start.", wait)
        waits.setdefault(start, []).append(wait)
    work, left_over = _work_of_waits(graph)
    transfers = []
    for start in _calls(graph, _START):
        if len(waits.get(start, ())) != 1 or len(start.users) != 1:
            count = len(waits.get(start, ()))
            raise OrderLost(
                f"an exchange of states (zeco::scan_start) is waited for {count} times and used by "
                f"{len(start.users)} nodes; it has to be one zeco::scan_wait.",
                start,
            )
        (wait,) = waits[start]
        if left_over and wait not in work:
            raise OrderLost(
                "an exchange of states is joined with no work of this graph, while zeco::"
                f"{left_over[0].target._opname} is joined with no exchange.",  # type: ignore[union-attr]
                start,
            )
        transfers.append(Transfer(start, wait, tuple(work.get(wait, ()))))
    return tuple(transfers)


def _work_of_waits(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], list[fx.Node]]:
    """What each wait's exchange runs beside, by the ops that join the two; and work that none joins."""
    work: dict[fx.Node, list[fx.Node]] = {}
    found = set()
    for join, (from_scan, from_work) in _JOINS.items():
        for node in _calls(graph, join):
            wait = _behind(argument(node, from_scan), (_WAIT,))
            part = _behind(argument(node, from_work), _WORK)
            if part is not None:
                found.add(part)
            if wait is not None and part is not None and part not in work.setdefault(wait, []):
                work[wait].append(part)
    return work, [node for target in _WORK for node in _calls(graph, target) if node not in found]


def _behind(value: Any, targets: Sequence[Any]) -> fx.Node | None:
    """The call of one of `targets` that gives the value, seen through items, casts, views, copies."""
    node = value
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in targets:
            return node
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return None
        node = inputs[0]
    return None


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target, sort=True))


# ----- order


def order_transfers(graph: fx.Graph) -> tuple[Transfer, ...]:
    """Orders the nodes as promised above; the transfers. Linear in the graph for each of them.

    Leaves a graph without transfers as it is. Raises `OrderLost`.
    """
    transfers = find_transfers(graph)
    if not transfers:
        return ()
    original = list(graph.nodes)
    wanted = list(original)
    for transfer in transfers:
        wanted = _wait_late(_start_early(_exchanges_first(wanted, transfer), transfer), transfer)
    ordered = _emit(wanted, _dependencies(original, transfers))
    for transfer in transfers:
        # again: what a user needs besides may have come later than it was wanted
        ordered = _wait_late(ordered, transfer)
    _rearrange(graph, ordered)
    _verify(graph, transfers)
    graph.lint()
    return transfers


def _exchanges_first(order: list[fx.Node], transfer: Transfer) -> list[fx.Node]:
    begin = order.index(transfer.start)
    after = {node: place for place, node in enumerate(order) if place > begin}
    needed = _ancestors(transfer.work, after)
    exchanges = [node for node in needed if communicates(node)]
    moved = _ancestors(exchanges, after) | set(exchanges)
    # Behind the wait of another exchange they have to stay: before it they would undo that one's overlap.
    if not exchanges or any(node.target is _WAIT for node in moved):
        return order
    rest = [node for node in order[begin:] if node not in moved]
    return [*order[:begin], *(node for node in order[begin:] if node in moved), *rest]


def _start_early(order: list[fx.Node], transfer: Transfer) -> list[fx.Node]:
    end = order.index(transfer.start)
    ahead = {node: place for place, node in enumerate(order[:end])}
    needed = _ancestors([transfer.start], ahead)
    # A start does not pass inputs, nor a communication that it could do without.
    fixed = [n for n in order[:end] if n.op == "placeholder" or (communicates(n) and n not in needed)]
    begin = 1 + ahead[fixed[-1]] if fixed else 0
    stretch = order[begin:end]
    first = [node for node in stretch if node in needed]
    later = [node for node in stretch if node not in needed]
    return [*order[:begin], *first, transfer.start, *later, *order[end + 1 :]]


def _wait_late(order: list[fx.Node], transfer: Transfer) -> list[fx.Node]:
    rest = [node for node in order if node is not transfer.wait]
    users = transfer.wait.users
    place = next(place for place, node in enumerate(rest) if node in users or node.op == "output")
    for work in transfer.work:
        place = max(place, rest.index(work) + 1)
    return [*rest[:place], transfer.wait, *rest[place:]]


def _ancestors(nodes: Iterable[fx.Node], within: Iterable[fx.Node]) -> set[fx.Node]:
    """What `nodes` need, directly or not, among `within`; not they themselves."""
    allowed = within if isinstance(within, dict) else set(within)
    found: set[fx.Node] = set()
    open_nodes = list(nodes)
    while open_nodes:
        for source in open_nodes.pop().all_input_nodes:
            if source in allowed and source not in found:
                found.add(source)
                open_nodes.append(source)
    return found


def _dependencies(
    original: list[fx.Node], transfers: Sequence[Transfer]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """All (earlier, later) pairs that an order has to respect."""
    for node in original:
        for source in node.all_input_nodes:
            yield source, node
    for transfer in transfers:
        for work in transfer.work:
            yield transfer.start, work
            # the item is what a scheduler can wait for
            yield _tensor_of(work), transfer.wait
    yield from itertools.pairwise(node for node in original if _is_collective(node))
    yield from itertools.pairwise(node for node in original if _is_random(node))
    yield from _around_mutations(original)


def _around_mutations(original: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What a mutation must not pass: the reads and writes of the same memory."""
    written = {key for node in original for key in _written(node)}
    last_write: dict[int, fx.Node] = {}
    reads: dict[int, list[fx.Node]] = {key: [] for key in written}
    for node in original if written else ():
        writes = _written(node)
        touched = {key for each in (node, *node.all_input_nodes) for key in _memory(each)} & written
        for key in touched:
            if key in last_write:
                yield last_write[key], node
            if key in writes:
                yield from ((read, node) for read in reads[key])
                last_write[key], reads[key] = node, []
            else:
                reads[key].append(node)


def _memory(node: fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(value) for value in values if isinstance(value, torch.Tensor)}


def _written(node: fx.Node) -> set[int]:
    """The memory that a node changes; of ops without a schema, all that it is given."""
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        changed = [
            argument(node, each.name)
            for each in schema.arguments
            if each.alias_info and each.alias_info.is_write
        ]
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.is_impure():
        changed = list(node.all_input_nodes)
    else:
        return set()
    nodes = [each for each in pytree.tree_leaves(changed) if isinstance(each, fx.Node)]
    return {key for each in nodes for key in _memory(each)}


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _is_collective(node: fx.Node) -> bool:
    """Collectives of the user, which too have to be in one order on all ranks."""
    return "c10d" in str(getattr(node.target, "namespace", ""))


def _emit(wanted: list[fx.Node], dependencies: Iterable[tuple[fx.Node, fx.Node]]) -> list[fx.Node]:
    """The topological order that always takes the first of `wanted` that is ready."""
    place = {node: index for index, node in enumerate(wanted)}
    later: dict[fx.Node, set[fx.Node]] = {node: set() for node in wanted}
    for source, node in dependencies:
        if source is not node:
            later[source].add(node)
    missing = dict.fromkeys(wanted, 0)
    for nodes in later.values():
        for node in nodes:
            missing[node] += 1
    ready = [place[node] for node in wanted if not missing[node]]
    heapq.heapify(ready)
    ordered: list[fx.Node] = []
    while ready:
        node = wanted[heapq.heappop(ready)]
        ordered.append(node)
        for follower in later[node]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, place[follower])
    if len(ordered) < len(wanted):
        stuck = next(node for node in wanted if missing[node])
        raise OrderLost(
            "an exchange of states cannot run beside its work: the order that this takes has a cycle (work "
            "that needs its own exchange, or random numbers or a mutation in between).",
            stuck,
        )
    return ordered


def _rearrange(graph: fx.Graph, ordered: list[fx.Node]) -> None:
    for earlier, node in itertools.pairwise(ordered):
        if earlier.next is not node:
            earlier.append(node)


def _verify(graph: fx.Graph, transfers: Sequence[Transfer]) -> None:
    place = {node: index for index, node in enumerate(graph.nodes)}
    for transfer in transfers:
        for work in transfer.work:
            if not place[transfer.start] < place[work] < place[transfer.wait]:
                raise OrderLost(f"{work.name} does not stand between its exchange's start and wait.", work)
        if place[transfer.start] > place[transfer.wait]:
            raise OrderLost("an exchange of states is waited for before its start.", transfer.wait)


# ----- keep it


def pin_order(graph: fx.Graph, transfers: Sequence[Transfer]) -> None:
    """Makes the order of communications, and of start, work and wait, a dependency that Inductor keeps.

    A wait also stays behind the other heavy ops that stand between its start and it.
    """
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    for earlier, node in itertools.pairwise(node for node in graph.nodes if communicates(node)):
        before.setdefault(node, {})[_tensor_of(earlier)] = None
    for transfer in transfers:
        for work in transfer.work:
            before.setdefault(work, {})[transfer.start] = None
            before.setdefault(transfer.wait, {})[_tensor_of(work)] = None
    order = list(graph.nodes)
    place = {node: index for index, node in enumerate(order)}
    for transfer in transfers:
        for node in order[place[transfer.start] : place[transfer.wait]]:
            if _is_heavy(node) and isinstance(_tensor_of(node).meta.get("val"), torch.Tensor):
                before.setdefault(transfer.wait, {})[_tensor_of(node)] = None
    # in the order of the graph, so that a dependency has been wrapped before the node that names it
    in_order = sorted(before, key=place.__getitem__)
    torch_private.pin_nodes(graph, {node: list(before[node]) for node in in_order})
    graph.lint()


def _is_heavy(node: fx.Node) -> bool:
    """Whether it is worth waiting behind. Such ops write their results to memory in any case; naming
    an elementwise op as a dependency would keep Inductor from fusing it away."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "zeco" or target.overloadpacket in _MATMULS


def _tensor_of(node: fx.Node) -> fx.Node:
    """The node itself, or its first item where it returns several tensors: a scheduler can wait for a tensor
    only, and ignores a tuple without a word."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    for user in node.users:
        if user.target is operator.getitem:
            return user
    return node


class OverlapPass(torch_private.GraphPass):
    """The pass for ``post_grad_custom_post_pass`` of Inductor.

    ``overlap=False`` leaves start and wait to Inductor, and keeps only the communications in one order.
    ``identity`` says what else the compiled code depends on; it is part of the key of PyTorch's caches.
    """

    def __init__(self, *, overlap: bool, identity: str) -> None:
        self.overlap = overlap
        self._identity = identity

    def __call__(self, graph: fx.Graph) -> None:
        pin_order(graph, order_transfers(graph) if self.overlap else ())

    def uuid(self) -> str:
        """Equal for equal code and options; `identity` has to name this file's content."""
        return f"zeco overlap={self.overlap} {self._identity}"
