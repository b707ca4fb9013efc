"""Linear attention called by name: the operator of this package in the user's graph, without a group yet.

`zeco_compile.gated_linear_attention`, and the library functions that are substituted for it while Dynamo traces
(zeco_compile/substitutes.py), arrive as one node. It already means the right thing on one rank; here it gets the
group that shares the sequence and the schedule of the exchange.
"""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.plans import settle, settled
from zeco_compile.passes.region import Sizes
from zeco_compile.passes.replacement import Wiring
from zeco_compile.passes.report import Region, Role

_NAMES = ("q", "k", "v", "g", "scale", "initial_state", "output_final_state", "schedule", "blocks", "group")


def wire_by_name(analysis: Analysis, wiring: Wiring, first_number: int) -> list[Region]:
    """Gives every operator in the graph its group. Returns what to report.

    Raises UnsupportedOp where the operator's time axis is not the sequence.
    """
    found: list[Region] = []
    packet = torch.ops.zeco.gated_linear_attention
    for node in analysis.gm.graph.nodes:
        # Dynamo keeps the packet that was called; graphs of other makers have the overload
        if node.target not in (packet, packet.default) or settled(node):
            continue
        given = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
        axes = [_time_axis(analysis, node, given[name]) for name in ("q", "k", "v")]
        along = {axis for axis in axes if axis != "unused"}
        if along <= {"whole on every rank"} or not analysis.shadow.tensors_made(node):
            settle(node)  # attention over another axis than the sequence, or nobody wants to know
            continue
        if along != {"sequence"}:
            raise UnsupportedOp(
                "zeco_compile.gated_linear_attention",
                location=user_location(node),
                why="dimension 1 of q, k and v has to be the sequence, all of it, on all of them or on none.",
                node=str(node),
            )
        node.args = (*(given[name] for name in _NAMES[:7]), wiring.schedule, wiring.blocks, wiring.group)
        node.kwargs = {}
        settle(node)
        found.append(_report(analysis, node, given, first_number + len(found)))
    return found


def _time_axis(analysis: Analysis, node: fx.Node, operand: fx.Node) -> str:
    """What dimension 1 of q, k or v is: "sequence", "whole on every rank", "rows of it" (some, or folded with another
    axis), or "unused" (q, where only the final state is asked for)."""
    values = analysis.shadow.tensors_read(node, operand)
    if not values:
        return "unused"
    value = values[0]
    dims = analysis.track.sequence_dims(value)
    if 1 not in dims:
        return "whole on every rank"
    whole = dims == [1] and analysis.track.axes.is_whole_sequence(analysis.track.dims(value)[1])
    return "sequence" if whole else "rows of it"


def _refuse_slices_of_a_state(analysis: Analysis, node: fx.Node, initial_state: object) -> None:
    if not isinstance(initial_state, fx.Node):
        return
    for value in analysis.shadow.tensors_read(node, initial_state):
        if analysis.track.sequence_dims(value):
            raise UnsupportedOp(
                "zeco_compile.gated_linear_attention",
                location=user_location(node),
                why="its initial state runs along the sequence, in dimension "
                f"{analysis.track.sequence_dims(value)[0]}; a state belongs to no position.",
                hints=[
                    "if it comes from an input that every rank holds whole, call "
                    "zeco_compile.mark_sequence(tensor, None) on that"
                ],
                node=str(initial_state),
            )


def _report(analysis: Analysis, node: fx.Node, given: dict[str, object], number: int) -> Region:
    roles: dict[str, Role] = {}
    for name in ("q", "k", "v", "g", "initial_state"):
        operand = given.get(name)
        if isinstance(operand, fx.Node):
            values = analysis.shadow.tensors_read(node, operand)
            shape = f"[{', '.join(str(s) for s in values[0].meta['val'].shape)}]" if values else ""
            roles[name] = Role(str(operand), shape, "" if values else "unused", user_location(operand))
    g = given.get("g")
    family = "none"
    if isinstance(g, fx.Node):
        rank = analysis.shadow.tensors_read(node, g)[0].meta["val"].dim()
        family = {1: "constant per head", 3: "per head and token", 4: "per channel"}[rank]
    return Region(
        name=f"attention_{number}",
        family=family,  # type: ignore[arg-type]
        how="by name",
        location=user_location(node),
        roles=roles,
        scale=f"{given['scale']:.6g}",
        sizes=_sizes(analysis, node, given),
    )


def _sizes(analysis: Analysis, node: fx.Node, given: dict[str, object]) -> dict[str, int]:
    at = Sizes(analysis, analysis.real_length)
    k, v = (analysis.shadow.tensors_read(node, given[name])[0] for name in ("k", "v"))  # type: ignore[arg-type]
    (batch, _, heads, key), value = at.shape(k), at.shape(v)[3]
    g = given.get("g")
    per_channel = isinstance(g, fx.Node) and analysis.shadow.tensors_read(node, g)[0].meta["val"].dim() == 4
    dtype = v.meta["val"].dtype
    return {
        "B": batch,
        "T": at.length,
        "H": heads,
        "K": key,
        "V": value,
        "decay width": key if per_channel else 1,
        "bytes of v": dtype.itemsize,
        "bytes of the state": 8 if dtype == torch.float64 else 4,
    }
