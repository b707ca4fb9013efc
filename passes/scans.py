"""`torch._higher_order_ops.scan` over the sequence: its body, for all steps at once.

A scan is a loop whose body Dynamo keeps as one graph. Here that body is written into the user's graph with all steps
as one more dimension, by `torch.vmap`, and what is carried from step to step becomes a pair of operators that stand
for it (`lowering/carries.py`). So what a step computes of its own token is one op for all tokens, what it does to its
outputs is one op behind them, and what lies between is found by `recognize` like any other region; `region` runs it
step by step. Nothing has to be unrolled, and the length stays a symbol.

    open_scans    writes the bodies out; the scans stay, and nobody reads them
    close_scans   where a carry is still needed, readers get the scan's own results back; the rest goes
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.checkpoints import inherit
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import changes_gradient
from zeco_compile.passes.region import INSIDE, SPREADS, Sizes
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.schema import argument, following, is_random
from zeco_compile.passes.sizes import size_of

log = logging.getLogger(__name__)

aten = torch.ops.aten


@dataclass
class OpenScan:
    """A scan whose body has been written out. `results` are the nodes that have taken the place of its own."""

    scan: fx.Node
    emitted: list[fx.Node] = field(default_factory=list)
    results: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What the user's graph read of the scan -> what it reads now."""

    carries: list[fx.Node] = field(default_factory=list)
    """The nodes that stand for the carry before each step."""


class _Unreadable(Exception):
    """Why a scan is left as it is."""


def with_gradients(gm: fx.GraphModule) -> None:
    """What is scanned has its gradient, though Dynamo did not see it (`lowering/carries.py`)."""
    for node in list(gm.graph.nodes):
        if node.target in (torch.ops.zeco.scanned, torch.ops.zeco.scanned.default):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def open_scans(analysis: Analysis) -> tuple[list[OpenScan], list[tuple[fx.Node, str]]]:
    """Writes out the body of each scan over the sequence in the graph of `analysis` that can be read so. Returns these,
    and the others with the reason."""
    opened, left = [], []
    for node in list(analysis.gm.graph.nodes):
        if torch_private.is_scan(node.target):
            try:
                opened.append(_open(analysis, node, _batched(analysis, node)))
            except _Unreadable as why:
                log.debug("the scan `%s` is left alone: %s", node, why)
                left.append((node, str(why)))
    return opened, left


def close_scans(
    analysis: Analysis,
    opened: Sequence[OpenScan],
    decisions: list[Decision],
    attempts: list[tuple[fx.Node, str]],
) -> int:
    """Drops what nobody needs of the scans, written out or not. Returns in how many places the graph has changed.

    `attempts` to find linear attention that end in what goes are said of the scan.
    """
    gm, shadow = analysis.gm, analysis.shadow
    for each in opened:
        waiting = following(each.carries, but=(aten.sym_size.int,))
        for node in reversed(list(gm.graph.nodes)):  # calls whose results nobody reads
            idle = node in waiting and node not in shadow.writes and not shadow.groups.get(node)
            if idle and node.op.startswith("call") and not node.users:
                gm.graph.erase_node(node)
        for own, written_out in each.results.items():
            if written_out in waiting:
                written_out.replace_all_uses_with(own)
        inside, there = set(each.emitted), set(gm.graph.nodes)
        attempts[:] = [(each.scan if node in inside else node, why) for node, why in attempts]
        for node in reversed(each.emitted):
            if node in there and not node.users:
                gm.graph.erase_node(node)
        for own in [user for user in each.scan.users if not user.users]:
            gm.graph.erase_node(own)
        if not each.scan.users:
            where = user_location(each.scan)
            decisions.append(
                Decision(str(each.scan), op_name(each.scan), "written out for all steps at once", where, "")
            )
            gm.graph.erase_node(each.scan)
    return len(opened)


def _body(analysis: Analysis, scan: fx.Node) -> fx.GraphModule:
    body = analysis.gm.get_submodule(str(scan.args[0].target))  # type: ignore[union-attr]
    assert isinstance(body, fx.GraphModule)
    return body


def _operands(scan: fx.Node) -> tuple[list[Any], list[Any], list[Any]]:
    """(initial carries, what is scanned, what is the same in all steps)."""
    _, initial, scanned, *shared = scan.args
    return list(initial), list(scanned), list(shared[0]) if shared else []  # type: ignore[arg-type]


def _batched(analysis: Analysis, scan: fx.Node) -> fx.GraphModule:
    """The body for all steps at once; its results come first among the outputs. Raises _Unreadable."""
    track, shadow = analysis.track, analysis.shadow
    held = scan.args[0]
    readers = [user for user in scan.users if user.target is not operator.getitem]
    if scan.kwargs or readers or not isinstance(held, fx.Node) or held.op != "get_attr":
        raise _Unreadable("it is called, or read, in another way than is known")
    initial, scanned, shared = _operands(scan)
    values = [shadow.reads.get((scan, each)) for each in scanned]
    some_along = any(isinstance(value, fx.Node) and track.sequence_dims(value) for value in values)
    for value in values:
        if isinstance(value, fx.Node) and some_along and _is_spread(analysis, value):
            continue
        if not isinstance(value, fx.Node) or track.sequence_dims(value) != [0]:
            raise _Unreadable("it does not scan along the sequence")
        if not track.axes.is_whole_sequence(track.dims(value)[0]):
            raise _Unreadable("it scans some rows of the sequence only")
    for each in (*initial, *shared):
        value = shadow.reads.get((scan, each)) if isinstance(each, fx.Node) else None
        if isinstance(value, fx.Node) and track.sequence_dims(value):
            raise _Unreadable("what it starts with, or what all its steps share, runs along the sequence")
    body = _body(analysis, scan)
    for node in body.graph.nodes:
        named = getattr(node.target, "__name__", "")
        if node.op not in ("placeholder", "output", "call_function", "call_method"):
            raise _Unreadable("its body holds something by itself")
        if node.op.startswith("call") and (changes_gradient(node) or named.startswith(_CONTEXTS)):
            raise _Unreadable(
                f"`{op_name(node)}` in it changes the gradient, or the mode that it is computed in"
            )

    def fake(argument: Any) -> Any:
        value = shadow.reads.get((scan, argument)) if isinstance(argument, fx.Node) else argument
        return value.meta["val"] if isinstance(value, fx.Node) else value

    with torch_private.fake_inputs(analysis.gm, analysis.example_inputs)[0], torch.no_grad():
        rows = fake(scanned[0]).shape[0]
        carried = [fake(each).unsqueeze(0).expand(rows, *fake(each).shape).clone() for each in initial]
        fakes = [*carried, *map(fake, scanned), *map(fake, shared)]
        dims = [0] * (len(initial) + len(scanned)) + [None] * len(shared)
        try:
            traced = torch_private.trace_batched(body, fakes, dims)
        except RuntimeError as error:  # of torch.vmap, which does not know every op
            what, *_ = str(error).splitlines() or [type(error).__name__]
            raise _Unreadable(f"it cannot be computed for all steps at once ({what})") from error
    if any(map(is_random, traced.graph.nodes)):
        raise _Unreadable("its steps draw random numbers")
    if _begins_with_a_flag(body, len(initial)) and not _is_associative(analysis, body, fakes):
        raise _Unreadable(
            "what combines two values is not associative, and so the order of combining is not defined"
        )
    return traced


def _is_spread(analysis: Analysis, value: fx.Node) -> bool:
    """The same row as often as the slice has rows: it may be said to run along the sequence."""
    first, *others = (analysis.track.axes.flat(dim) for dim in analysis.track.dims(value))
    alike = len(first) == 1 and first[0].origins == {"broadcast"} and not analysis.track.sequence_dims(value)
    return alike and first[0] not in itertools.chain(*others) and analysis.track.axes.is_length(first[0].size)


def _begins_with_a_flag(body: fx.GraphModule, carries: int) -> bool:
    """As `scans_by_name.associative_scan` makes it: something is carried that is one after the first step."""
    output = next(n for n in body.graph.nodes if n.op == "output")
    first = output.args[0][0]
    return carries > 1 and isinstance(first, fx.Node) and first.target is torch.ones_like


def _is_associative(analysis: Analysis, body: fx.GraphModule, fakes: Sequence[Any]) -> bool:
    """Of a body that begins with a flag, as `scans_by_name.associative_scan` makes it: what it does to a carry and a
    token, once the flag is set, may be done in any order."""
    at = Sizes(analysis, analysis.real_length)
    generator = torch.Generator().manual_seed(3)

    def drawn(fake: Any, first: int) -> Any:
        if not isinstance(fake, torch.Tensor):
            return at.of_size(size_of(fake)) if isinstance(fake, torch.SymInt) else fake
        sizes = [at.of_size(size_of(size)) for size in fake.shape[first:]]
        size = torch.rand(sizes, generator=generator, dtype=torch.float64) + 0.2
        if not fake.dtype.is_complex:
            return size
        return torch.polar(size, torch.rand(sizes, generator=generator, dtype=torch.float64) * 6)

    count = (_count_results(body) - 1) // 2
    shared = [drawn(fake, 0) for fake in fakes[1 + 2 * count :]]
    one, two, three = ([drawn(fake, 1) for fake in fakes[1 : 1 + count]] for _ in range(3))
    flag = torch.ones((), dtype=torch.float64)

    def combined(left: list[Any], right: list[Any]) -> list[Any]:
        return list(fx.Interpreter(body).run(flag, *left, *right, *shared))[1 + count :]

    try:
        first_two, last_two = combined(combined(one, two), three), combined(one, combined(two, three))
    except RuntimeError as error:
        raise _Unreadable(f"what combines two values cannot be tried out ({error})") from error
    return all(torch.allclose(a, b, rtol=1e-9, atol=0.0) for a, b in zip(first_two, last_two, strict=True))


_CONTEXTS = ("_enter_", "_exit_", "_set_grad_enabled", "inference_mode", "set_autocast")


def _open(analysis: Analysis, scan: fx.Node, traced: fx.GraphModule) -> OpenScan:
    graph = analysis.gm.graph
    initial, scanned, shared = _operands(scan)
    made = OpenScan(scan)

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(scan):
            node = inherit(graph.call_function(target, args, kwargs), scan)
        made.emitted.append(node)
        return node

    made.carries = [emit(torch.ops.zeco.carry_before.default, each, scanned[0]) for each in initial]
    for node in made.carries:
        node.meta[INSIDE] = True
    inputs = [*made.carries, *scanned, *shared]
    output = next(n for n in traced.graph.nodes if n.op == "output")
    assert isinstance(output.args[0], list | tuple), "what was traced returns a list"
    results = list(output.args[0])[: _count_results(_body(analysis, scan))]
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    body = [n for n in traced.graph.nodes if n.op == "call_function"]
    of_carry = following(placeholders[: len(initial)], but=(aten.sym_size.int,))
    updates = _leading_to(results[: len(initial)]) & of_carry
    size = {n: _of_one_step(analysis, n.meta.get("val")) for n in (*placeholders, *body)}
    of_token = placeholders[len(initial) : len(initial) + len(scanned)]
    spreading, largest = _spreading([n for n in body if n not in of_carry], of_token, size)
    for carry, result in zip(placeholders, results[: len(initial)], strict=False):
        if not spreading.isdisjoint(_leading_to([result])):
            largest = min(largest, size[carry] - 1)  # a matrix, from which something smaller is read

    def copy(node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.target is aten.sym_size.int and isinstance(args[0], fx.Node) and args[0] in made.carries:
            # Of a size nobody is to need the carry.
            dim = argument(node, "dim")
            args = (scanned[0], 0) if dim == 0 else (initial[made.carries.index(args[0])], dim - 1)
        # Strides are those of the trace; an operator that takes a region's place has others.
        reshapes = node.target in (aten.view.default, aten._unsafe_view.default)
        new = env[node] = emit(aten.reshape.default if reshapes else node.target, *args, **kwargs)
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            new.meta["example_value"] = value  # where Dynamo keeps it
        if node in spreading:
            new.meta[SPREADS] = True
        if (
            node in of_carry
            and (node in updates or size[node] > largest)
            and node not in results[len(initial) :]
        ):
            new.meta[INSIDE] = True

    # What computes the next carry comes first, so that it is known what a value of the carry is worth.
    first = _leading_to(results[: len(initial)])
    for node in body:
        if node in first:
            copy(node)
    after = [
        emit(torch.ops.zeco.carry_after.default, before, env[result])
        for before, result in zip(made.carries, results, strict=False)
    ]
    for node in after:
        node.meta[INSIDE] = True
    for node in body:
        if node not in first:
            copy(node)
    for own in _read(scan):
        index = own.args[1]
        assert isinstance(index, int), "the results of a scan are read one by one"
        last = index < len(initial)
        new = emit(aten.select.int, after[index], 0, -1) if last else env[results[index]]
        if not last and results[index] in first:  # a region may end here, where all that is carried is known
            new = emit(aten.clone.default, new)
        own.replace_all_uses_with(new)
        made.results[own] = new
    return made


def _read(scan: fx.Node) -> list[fx.Node]:
    return [user for user in scan.users if user.target is operator.getitem]


def _count_results(body: fx.GraphModule) -> int:
    output = next(n for n in body.graph.nodes if n.op == "output")
    results = output.args[0]
    return len(results) if isinstance(results, list | tuple) else 1


def _leading_to(nodes: Sequence[Any]) -> set[fx.Node]:
    """These nodes, and all that they are computed from."""
    stack = [n for n in nodes if isinstance(n, fx.Node)]
    found = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def _spreading(
    body: Sequence[fx.Node], of_token: Sequence[fx.Node], size: dict[fx.Node, int]
) -> tuple[set[fx.Node], int]:
    """The nodes that combine values of a token to more than it has, with what is computed from these; and how many
    elements the largest value of a token has that is none of them."""
    of_step, spreading = set(of_token), set[fx.Node]()
    token = max(size[n] for n in of_token)
    for node in body:
        values = [n for n in node.all_input_nodes if n in of_step]
        if not values:
            continue
        of_step.add(node)
        grows = 0 < max(size[n] for n in values) < size[node]
        if not spreading.isdisjoint(values) or (grows and len(values) > 1):
            spreading.add(node)
        elif not grows or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            token = max(token, size[node])
    return spreading, token


def _of_one_step(analysis: Analysis, value: Any) -> int:
    """The elements of a value for each step; 0 for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    at = Sizes(analysis, analysis.real_length)
    return at.of_size(size_of(value.numel())) // analysis.real_length
