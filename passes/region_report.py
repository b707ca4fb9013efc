"""What the report says of a region that was found by meaning: roles, sizes, checks and source lines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.complex_recurrences import (
    ComplexRoles,
)
from zeco_compile.passes.gates import Gate
from zeco_compile.passes.layout import (
    Canonical,
    promoted,
)
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.recognize import Match
from zeco_compile.passes.region import (
    Region,
    Sizes,
)
from zeco_compile.passes.report import Region as RegionReport
from zeco_compile.passes.report import Role
from zeco_compile.passes.roles import (
    OwnTerm,
    Roles,
)


def report_region(analysis: Analysis, match: Match, number: int, gate: Gate, end: fx.Node) -> RegionReport:
    """What was found and wired. `end` is the node of the user's graph behind which the region's result is there."""
    roles, region = match.roles, match.region
    if isinstance(roles, ComplexRoles):
        return _complex_report(analysis, match, roles, number, end)
    gate_node, gate_form, _ = gate
    entries: dict[str, Role] = {}
    entering = {node: entrance.name for node, entrance in roles.entering}
    for role, nodes in (("q", roles.q), ("k", roles.k), ("v", roles.v)):
        for i, node in enumerate(nodes):
            entries[role if len(nodes) == 1 else f"{role} (factor {i + 1})"] = _role(
                analysis, node, entering.get(node, "")
            )
    if gate_node is not None and gate_form is not None:
        entries["g"] = _role(
            analysis, gate_node, "" if gate_form.name == "g" else f"log decay = {gate_form.name}"
        )
    for node, form in roles.gates[1:]:
        entries["g (second factor)"] = _role(analysis, node, f"log decay = {form.name}")
    for i, node in enumerate(roles.own.beside if roles.own is not None else ()):
        entries["own term" if not i else f"own term (factor {i + 1})"] = _role(analysis, node, "")
    if roles.initial_state is not None:
        entries["initial_state"] = _role(analysis, roles.initial_state, "")
    entries["o"] = _role(analysis, region.output, "")
    return RegionReport(
        name=f"attention_{number}",
        family=roles.family,  # type: ignore[arg-type]
        how="by meaning",
        location=user_location(end),
        roles=entries,
        scale=f"{roles.scale:.6g}",
        layout="; ".join(f"{kind.name.lower()} {kind.value}" for kind in (Canonical.KEY, Canonical.VALUE)),
        notes=[
            f"{len(region.user_nodes)} nodes of your graph became one operator",
            *([f"k is multiplied with {roles.write_factor} of the decay a"] if roles.write_factor else []),
            *([f"a position reads the state before its own write, {roles.before}"] if roles.before else []),
            *([_told(analysis, roles.own)] if roles.own else []),
            *(["its result has no gradient, as in your code"] if match.detached else []),
            *([f"what a position reads is multiplied by {roles.rows}"] if roles.rows else []),
            *([f"log decay of each head: {_listed(roles.constant)}"] if roles.constant else []),
            *(f"the values of `{mask.name}` were taken as they are" for mask in region.masks),
        ],
        sizes=_sizes(analysis, region, roles),
        check_error=match.error,
        sizes_checked=list(match.sizes),
    )


def _complex_report(
    analysis: Analysis, match: Match, roles: ComplexRoles, number: int, end: fx.Node
) -> RegionReport:
    region = match.region
    entries: dict[str, Role] = {}
    for role, nodes in (("a", roles.decays), ("u", roles.written)):
        for i, node in enumerate(nodes):
            entries[role if len(nodes) == 1 else f"{role} (factor {i + 1})"] = _role(analysis, node, "")
    if roles.initial_state is not None:
        entries["initial_state"] = _role(analysis, roles.initial_state, "")
    entries["h"] = _role(analysis, region.output, "")
    at = Sizes(roles.axes.analysis, roles.axes.analysis.real_length)
    elements = at.of_dim(roles.axes.value)
    itemsize = roles.axes.output.meta["val"].dtype.itemsize
    return RegionReport(
        name=f"attention_{number}",
        family=roles.family,
        how="by meaning",
        location=user_location(end),
        roles=entries,
        scale=f"{roles.scale:.6g}",
        notes=[
            f"{len(region.user_nodes)} nodes of your graph became one operator",
            "h = a * h + u of each element by itself, in complex numbers; a state is one of them for each element",
            *(["its result has no gradient, as in your code"] if match.detached else []),
        ],
        sizes={
            "B": at.of_dim(roles.axes.batch),
            "T": at.length,
            "H": 1,
            "K": elements,
            "V": 1,
            "decay width": elements,
            "bytes of v": itemsize,
            "bytes of the state": itemsize,
        },
        check_error=match.error,
        sizes_checked=list(match.sizes),
    )


def _told(analysis: Analysis, own: OwnTerm) -> str:
    of = ", ".join(map(analysis.described, own.inputs))
    return f"a position adds {own.weight:g} times the product of {of} at its own place"


def _listed(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, ... ({len(values)} heads)"


def _sizes(analysis: Analysis, region: Region, roles: Roles) -> dict[str, int]:
    axes, at = roles.axes, Sizes(roles.axes.analysis, analysis.real_length)
    dtype = promoted([*roles.q, *roles.k, *roles.v], region.output.meta["val"].dtype)
    key = at.of_dim(axes.key)
    return {
        "B": at.of_dim(axes.batch),
        "T": at.length,
        "H": at.of_dim(axes.heads),
        "K": key,
        "V": at.of_dim(axes.value),
        "decay width": key if axes.gate_has_key else 1,
        "bytes of v": dtype.itemsize,
        "bytes of the state": 8 if dtype == torch.float64 else 4,
    }


def _role(analysis: Analysis, node: fx.Node, transform: str) -> Role:
    user_node = analysis.shadow.origin.get(node)
    if user_node is None:
        user_node = next((u for u, a in analysis.shadow.inputs.items() if a is node), None)
    sizes = ", ".join(str(s) for s in node.meta["val"].shape)
    return Role(str(user_node or node), f"[{sizes}]", transform, user_location(user_node))
