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
from zeco_compile.passes.report import Decision, op_name

log = logging.getLogger(__name__)

aten = torch.ops.aten

SPREADS = "zeco_spreads"
"""Mark of a node of the user's graph that makes more of a token than the token has: an outer product of k and v. It is
computed inside of a step so that it need not be held for all of them."""

INSIDE = "zeco_inside_step"
"""Mark of a node of the user's graph with which no region should end: it computes the next state, or is larger than
what a token has."""


@dataclass
class OpenScan:
    """A scan whose body has been written out. `results` are the nodes that have taken the place of its own."""

    scan: fx.Node
    emitted: list[fx.Node] = field(default_factory=list)
    results: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What the user's graph read of the scan -> what it reads now."""

    carries: list[fx.Node] = field(default_factory=list)
    """The nodes that stand for the carry before each step."""


def open_scans(analysis: Analysis) -> list[OpenScan]:
    """Writes out the body of each scan over the sequence in the graph of `analysis` that can be read so."""
    opened = []
    for node in list(analysis.gm.graph.nodes):
        if not torch_private.is_scan(node.target):
            continue
        why = _unreadable(analysis, node)
        if why is not None:
            log.debug("the scan `%s` is left alone: %s", node, why)
            continue
        opened.append(_open(analysis, node))
    return opened


def close_scans(gm: fx.GraphModule, opened: Sequence[OpenScan], decisions: list[Decision]) -> int:
    """Drops what nobody needs of the scans, written out or not. Returns how many scans are gone."""
    gone = 0
    for each in opened:
        waiting = _following(each.carries)
        for own, written_out in each.results.items():
            if written_out in waiting:
                written_out.replace_all_uses_with(own)
        for node in reversed(each.emitted):
            if not node.users:
                gm.graph.erase_node(node)
        for own in [user for user in each.scan.users if not user.users]:
            gm.graph.erase_node(own)
        if not each.scan.users:
            gone += 1
            where = user_location(each.scan)
            decisions.append(
                Decision(str(each.scan), op_name(each.scan), "written out for all steps at once", where, "")
            )
            gm.graph.erase_node(each.scan)
    return gone


def _following(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that is computed from them."""
    found, stack = set(nodes), list(nodes)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _body(analysis: Analysis, scan: fx.Node) -> fx.GraphModule:
    body = analysis.gm.get_submodule(str(scan.args[0].target))  # type: ignore[union-attr]
    assert isinstance(body, fx.GraphModule)
    return body


def _operands(scan: fx.Node) -> tuple[list[Any], list[Any], list[Any]]:
    """(initial carries, what is scanned, what is the same in all steps)."""
    _, initial, scanned, *shared = scan.args
    return list(initial), list(scanned), list(shared[0]) if shared else []  # type: ignore[arg-type]


def _unreadable(analysis: Analysis, scan: fx.Node) -> str | None:
    """Why the body of a scan cannot be written out; None if it can."""
    track, shadow = analysis.track, analysis.shadow
    initial, scanned, shared = _operands(scan)
    if scan.kwargs or not initial or not scanned or len(_read(scan)) != len(scan.users):
        return "it is called, or read, in another way than is known"
    for each in scanned:
        value = shadow.reads.get((scan, each))
        if not isinstance(value, fx.Node) or track.sequence_dims(value) != [0]:
            return f"`{each}` does not run along the sequence, in its first dimension"
        if not track.axes.is_whole_sequence(track.dims(value)[0]):
            return f"`{each}` has only some rows of the sequence"
    for each in (*initial, *shared):
        value = shadow.reads.get((scan, each)) if isinstance(each, fx.Node) else None
        if isinstance(value, fx.Node) and track.sequence_dims(value):
            return f"`{each}` runs along the sequence, and is the same for all steps"
    held = scan.args[0]
    if not isinstance(held, fx.Node) or held.op != "get_attr":
        return "its body is no graph"
    for node in _body(analysis, scan).graph.nodes:
        named = getattr(node.target, "__name__", "")
        if node.op not in ("placeholder", "output", "call_function", "call_method"):
            return f"`{node}` in it is held by the body itself"
        if node.op.startswith("call") and (changes_gradient(node) or named.startswith(_CONTEXTS)):
            return f"`{node}` in it changes the gradient, or the mode that it is computed in"
    return None


_CONTEXTS = ("_enter_", "_exit_", "_set_grad_enabled", "inference_mode", "set_autocast")


def _open(analysis: Analysis, scan: fx.Node) -> OpenScan:
    shadow, graph = analysis.shadow, analysis.gm.graph
    initial, scanned, shared = _operands(scan)
    made = OpenScan(scan)

    def fake(argument: Any) -> Any:
        value = shadow.reads.get((scan, argument)) if isinstance(argument, fx.Node) else argument
        return value.meta["val"] if isinstance(value, fx.Node) else value

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(scan):
            node = inherit(graph.call_function(target, args, kwargs), scan)
        made.emitted.append(node)
        return node

    made.carries = [emit(torch.ops.zeco.carry_before.default, each, scanned[0]) for each in initial]
    inputs = [*made.carries, *scanned, *shared]
    fake_mode = torch_private.fake_inputs(analysis.gm, analysis.example_inputs)[0]
    with fake_mode, torch.no_grad():
        rows = fake(scanned[0]).shape[0]
        carried = [fake(each).unsqueeze(0).expand(rows, *fake(each).shape).clone() for each in initial]
        fakes = [*carried, *map(fake, scanned), *map(fake, shared)]
        batched = [0] * (len(initial) + len(scanned)) + [None] * len(shared)
        traced = torch_private.trace_batched(_body(analysis, scan), fakes, batched)
    output = next(n for n in traced.graph.nodes if n.op == "output")
    assert isinstance(output.args[0], list | tuple), "what was traced returns a list"
    results = list(output.args[0])[: _count_results(_body(analysis, scan))]
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    body = [n for n in traced.graph.nodes if n.op == "call_function"]
    of_carry = _following(placeholders[: len(initial)])
    updates = _leading_to(results[: len(initial)]) & of_carry
    spreading, token = _spreading(body, placeholders[len(initial) : len(initial) + len(scanned)], of_carry)

    def copy(node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        new = env[node] = emit(node.target, *args, **kwargs)
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        value = node.meta.get("val")
        if node in spreading:
            new.meta[SPREADS] = True
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            new.meta["example_value"] = value  # where Dynamo keeps it
        inner = node in updates or (isinstance(value, torch.Tensor) and _of_one_step(value) > token)
        if inner and node in of_carry and node not in results[len(initial) :]:
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


def _spreading(body: Sequence[fx.Node], scanned: Sequence[fx.Node], of_carry: set[fx.Node]) -> tuple[set[fx.Node], int]:
    """The nodes that combine values of a token to more than it has, with what is computed from these; and how many
    elements the largest value of a token has that is none of them."""
    of_step, spreading = set(scanned), set[fx.Node]()
    token = max(_of_one_step(n.meta["val"]) for n in scanned)
    for node in body:
        operands_ = [n for n in node.all_input_nodes if n in of_step]
        value = node.meta.get("val")
        if node in of_carry or not operands_:
            continue
        of_step.add(node)
        if not isinstance(value, torch.Tensor):
            continue  # several, each an item of its own
        largest = max((_of_one_step(n.meta["val"]) for n in operands_ if isinstance(n.meta["val"], torch.Tensor)), default=0)
        grows = 0 < largest < _of_one_step(value)
        if not spreading.isdisjoint(operands_) or (grows and len(operands_) > 1):
            spreading.add(node)
        elif not grows or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            token = max(token, _of_one_step(value))
    return spreading, token


def _of_one_step(value: torch.Tensor) -> int:
    return int(torch.Size(int(size) for size in value.shape[1:]).numel())
