"""What the compiler found and did, as plain data: the passes append to it, nothing reads it back.

One `Report` per rank and graph. ``to_dict`` is the content of ``report.json``; ``to_markdown`` is
``report.md``, written for a reader who has never seen this project: a summary, then one section per kind of
fact, each entry with the line of the user's source that it is about.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from zeco_compile.passes.locations import UNKNOWN, Location

Family = Literal["per channel", "per head and token", "constant per head", "none", "complex"]
How = Literal["by name", "by meaning"]


@dataclass(frozen=True)
class Role:
    """What plays one role (q, k, v, g, initial_state, output) of a region in the user's graph.

    ``name`` is the node in the user's graph, ``shape`` its shape as text ("[B, T, H, K] = [2, s27, 4, 16]"),
    ``transform`` what is done to it to become the role ("log(a)", "transposed (1, 2)"), empty if nothing.
    """

    name: str
    shape: str = ""
    transform: str = ""
    location: Location = UNKNOWN


@dataclass
class Region:
    """A part of the user's graph that was replaced by one gated linear attention.

    ``sizes`` are B, T, H, K, V of this rank's call, the width of the decay (K, or 1 per head) and the bytes of
    an element of v and of the state. ``check_error`` is the largest relative difference from the float64
    recurrence in the numeric check, None where the region was recognised by name and needs none;
    ``sizes_checked`` names the sizes of each check.
    """

    name: str
    family: Family
    how: How
    location: Location
    roles: dict[str, Role] = field(default_factory=dict)
    scale: str = ""
    layout: str = ""
    notes: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    check_error: float | None = None
    sizes_checked: list[str] = field(default_factory=list)


@dataclass
class Decision:
    """What was done about one node that is not part of a region.

    ``decision`` is one of "position-local", "halo exchange", "offset", "all-reduce", "from owner", "scan",
    "gathered", "refused", or another short name; ``detail`` says in a few words why or how.
    """

    node: str
    op: str
    decision: str
    location: Location = UNKNOWN
    detail: str = ""


@dataclass
class Communication:
    """One exchange between ranks, as planned: what, which way, how much each rank sends.

    ``direction`` is "to the next rank", "to the previous rank", "to the opposite rank" (as far from the other
    end), "among all ranks". ``formula`` gives the bytes in the field's words ("B*H*K*V*4"), ``bytes_per_call``
    their number for the sizes at hand (None if a size is symbolic); ``calls`` how often in one step (forward
    and backward). ``alternatives`` are the bytes per rank and step of other ways to do the same, by name, for
    comparison.
    """

    what: str
    direction: str
    formula: str = ""
    bytes_per_call: int | None = None
    calls: int = 1
    alternatives: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_per_step(self) -> int | None:
        return None if self.bytes_per_call is None else self.bytes_per_call * self.calls


@dataclass
class Scan:
    """How the states of one region travel, as predicted from what a message costs (lowering/cost_model.py).

    ``state_bytes`` is one rank's state, ``seconds`` the predicted time of one scan in one direction, with nothing
    beside it. ``links`` has for "intra" (inside of a host) and "inter" (between hosts) the ``latency`` and ``gap`` in
    seconds a message, ``per_byte`` in seconds a byte, and ``source``: measured, a default, or assumed.
    """

    region: str
    schedule: str
    blocks: int
    state_bytes: int
    seconds: float
    wire: str
    hosts: int
    links: dict[str, dict[str, Any]]


@dataclass
class PassRecord:
    """One pass over the graph: how long, how many places it changed, which ops came (+) and went (-)."""

    name: str
    seconds: float = 0.0
    matches: int = 0
    op_difference: dict[str, int] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0


@dataclass
class Report:
    """Everything about one graph on one rank. ``length`` describes the local length ("128" or "s27")."""

    rank: int = 0
    world_size: int = 1
    group: str = ""
    graph: int = 0
    length: str = ""
    seq_inputs: dict[str, int | None] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    communication: list[Communication] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    error: str = ""
    location: Location = UNKNOWN

    @contextmanager
    def recording(self, name: str, gm: fx.GraphModule) -> Iterator[PassRecord]:
        """Times a pass over `gm` and counts its ops before and after; the pass fills in ``matches``.

        The record is kept when the pass raises, with what the pass had changed so far.
        """
        record = PassRecord(name)
        before = count_ops(gm)
        record.nodes_before = len(gm.graph.nodes)
        self.passes.append(record)
        start = time.perf_counter()
        try:
            yield record
        finally:
            record.seconds = time.perf_counter() - start
            record.nodes_after = len(gm.graph.nodes)
            record.op_difference = op_difference(before, count_ops(gm))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return asdict(self) | {"bytes_per_step": self.bytes_per_step}

    def to_markdown(self) -> str:
        """The report as a document: summary, then tables. Empty sections say so instead of being left out."""
        sections = [
            _summary(self),
            _regions_section(self.regions),
            _decisions_section(self.decisions),
            _scans_section(self.scans),
            _communication_section(self.communication),
            _passes_section(self.passes),
            _settings_section(self.settings),
        ]
        return "\n\n".join(section for section in sections if section) + "\n"

    @property
    def bytes_per_step(self) -> int | None:
        """Bytes that this rank sends in one forward and backward; None if one of them is symbolic."""
        amounts = [entry.bytes_per_step for entry in self.communication]
        return None if any(amount is None for amount in amounts) else sum(amount or 0 for amount in amounts)


STANDS_FOR = "zeco_stands_for"


def user_op_name(node: fx.Node) -> str:
    """As `op_name`, for people: a node that stands in for one of the user's has the name of that one, which a pass
    has left in its ``meta[STANDS_FOR]``."""
    return str(node.meta.get(STANDS_FOR) or op_name(node))


def op_name(node: fx.Node) -> str:
    """A readable name of what a node does: "torch.sin", "aten.add.Tensor", "Tensor.view", "output"."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op != "call_function":
        return node.op
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    name = getattr(target, "__name__", str(target))
    module = (getattr(target, "__module__", None) or "").removeprefix("_")
    if module.startswith("torch.nn.functional"):
        module = "F"
    return f"{module}.{name}" if module and module != "builtins" else name


def count_ops(gm: fx.GraphModule) -> Counter[str]:
    """How often each op occurs, subgraphs (checkpoint, scan) included; inputs and outputs do not count."""
    counts: Counter[str] = Counter()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            counts.update(
                op_name(node)
                for node in module.graph.nodes
                if node.op in ("call_function", "call_method", "call_module")
            )
    return counts


def op_difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Ops whose count changed, by how much, sorted by name."""
    names = sorted(set(before) | set(after))
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change}


def _summary(report: Report) -> str:
    lines = [f"# zeco_compile: graph {report.graph} on rank {report.rank} of {report.world_size}", ""]
    if report.error:
        lines += ["**The compilation was refused or failed:**", "", _code_block(report.error), ""]
    lines.append(
        "Each rank runs this graph on its own contiguous slice of the sequence. This report says what the "
        "compiler recognised in the model, what it did about every operation that looks at other positions, "
        "and what the ranks send each other."
    )
    lines.append("")
    if report.location.known:
        lines.append(f"- model code: `{report.location}`")
    lines.append(f"- process group: {report.group or 'none (one rank)'}")
    lines.append(f"- tokens per rank: {report.length or 'unknown'}")
    lines.append(f"- inputs along the sequence: {_sequence_inputs(report.seq_inputs)}")
    lines.append(f"- linear-attention regions recognised: {len(report.regions)}")
    decided = Counter(decision.decision for decision in report.decisions)
    if decided:
        lines.append("- other operations: " + ", ".join(f"{n} {name}" for name, n in decided.most_common()))
    if report.world_size > 1:
        total = report.bytes_per_step
        amount = "depends on the length (see below)" if total is None else format_bytes(total)
        lines.append(f"- sent by this rank per step, forward and backward: {amount}")
    return "\n".join(lines)


def _sequence_inputs(seq_inputs: Mapping[str, int | None]) -> str:
    along = [f"`{name}` (dim {dim})" for name, dim in seq_inputs.items() if dim is not None]
    whole = [f"`{name}`" for name, dim in seq_inputs.items() if dim is None]
    text = ", ".join(along) or "none"
    return text + (f"; whole on every rank: {', '.join(whole)}" if whole else "")


def _regions_section(regions: list[Region]) -> str:
    lines = ["## Recognised linear attention"]
    if not regions:
        return "\n\n".join([*lines, "None in this graph."])
    lines.append(
        "Each of these computes `S_t = A_t S_{t-1} + k_t v_t^T`, `o_t = scale * S_t^T q_t`, with A_t the "
        "decay. It is replaced by the chunked form on the slice and an exchange of one state S between "
        "neighbours."
    )
    lines += [_region(region) for region in regions]
    return "\n\n".join(lines)


def _region(region: Region) -> str:
    decay = "no decay" if region.family == "none" else f"decay {region.family}"
    parts = [f"### {region.name}: {decay}, recognised {region.how}", _source(region.location)]
    rows = [
        [
            role,
            f"`{info.name}`",
            _code(info.shape),
            _code(info.transform) or "as it is",
            f"`{info.location}`" if info.location.known else "",
        ]
        for role, info in region.roles.items()
    ]
    if rows:
        parts.append(_table(["role", "in your graph", "shape", "how it becomes the role", "source"], rows))
    facts = []
    if region.scale:
        facts.append(f"- scale: `{region.scale}`")
    if region.layout:
        facts.append(f"- layout: {region.layout}")
    if region.check_error is not None:
        sizes = f" at {'; '.join(region.sizes_checked)}" if region.sizes_checked else ""
        facts.append(
            f"- checked in float64 against the recurrence: largest relative difference "
            f"{region.check_error:.1e}{sizes}"
        )
    facts += [f"- {note}" for note in region.notes]
    if facts:
        parts.append("\n".join(facts))
    return "\n\n".join(part for part in parts if part)


def _decisions_section(decisions: list[Decision]) -> str:
    lines = ["## Every other operation"]
    mixing = [decision for decision in decisions if decision.decision != "position-local"]
    local = Counter(decision.op for decision in decisions if decision.decision == "position-local")
    if mixing:
        rows = [
            [
                f"`{decision.node}`",
                _code(decision.op),
                f"**{decision.decision}**",
                decision.detail,
                f"`{decision.location}`" if decision.location.known else "",
                _code(decision.location.code),
            ]
            for decision in mixing
        ]
        lines.append("These look at other positions, or at where in the sequence they are:")
        lines.append(_table(["node", "operation", "decision", "detail", "source", "source line"], rows))
    else:
        lines.append("None looks at other positions.")
    if local:
        counts = ", ".join(f"`{name}` x{count}" for name, count in sorted(local.items()))
        lines.append(f"Position-local, left as they are ({local.total()}): {counts}")
    return "\n\n".join(lines)


def _scans_section(scans: list[Scan]) -> str:
    if not scans:
        return ""
    rows = [
        [
            scan.region,
            f"`{scan.schedule}`",
            str(scan.blocks),
            format_bytes(scan.state_bytes),
            format_seconds(scan.seconds),
        ]
        for scan in scans
    ]
    header = ["region", "schedule", "blocks", "state", "predicted time"]
    wires = {(scan.wire, scan.hosts): scan.links for scan in scans}
    links = [
        [
            wire,
            where,
            format_seconds(link["latency"]),
            format_seconds(link["gap"]),
            f"{link['per_byte'] * 1e9:.4g} ns",
            link["source"],
        ]
        for (wire, hosts), costs in wires.items()
        for where, link in ((f"inside of {hosts} host(s)", costs["intra"]), ("between hosts", costs["inter"]))
        if hosts > 1 or link is costs["intra"]
    ]
    return "\n\n".join(
        [
            "## How the states travel",
            "The time is that of one scan in one direction, by itself; what it hides behind is not counted.",
            _table(header, rows),
            "What a message costs (`python -m zeco_compile.tune` measures it):",
            _table(["wire", "where", "latency (alpha)", "gap", "a byte (beta)", "from"], links),
        ]
    )


def _communication_section(entries: list[Communication]) -> str:
    lines = ["## What the ranks send each other"]
    if not entries:
        return "\n\n".join([*lines, "Nothing."])
    rows = [
        [
            entry.what,
            entry.direction,
            _code(entry.formula),
            "symbolic" if entry.bytes_per_call is None else format_bytes(entry.bytes_per_call),
            str(entry.calls),
            "symbolic" if entry.bytes_per_step is None else format_bytes(entry.bytes_per_step),
            ", ".join(f"{name}: {format_bytes(n)}" for name, n in entry.alternatives.items()),
        ]
        for entry in entries
    ]
    header = ["what", "direction", "bytes", "per call", "calls per step", "per step", "for comparison"]
    lines.append("Amounts are what this rank sends; a step is one forward and one backward.")
    lines.append(_table(header, rows))
    return "\n\n".join(lines)


def _passes_section(passes: list[PassRecord]) -> str:
    lines = ["## Passes"]
    if not passes:
        return "\n\n".join([*lines, "None ran."])
    rows = [
        [
            record.name,
            f"{record.seconds * 1000:.1f}",
            str(record.matches),
            f"{record.nodes_before} -> {record.nodes_after}",
            ", ".join(f"{n:+d} `{name}`" for name, n in record.op_difference.items()) or "none",
        ]
        for record in passes
    ]
    lines.append(_table(["pass", "milliseconds", "matches", "nodes", "change in operations"], rows))
    return "\n\n".join(lines)


def _settings_section(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    rows = [[f"`{name}`", _code(repr(value))] for name, value in settings.items()]
    return "## Options\n\n" + _table(["option", "value"], rows)


def _source(location: Location) -> str:
    if not location.known:
        return ""
    text = f"`{location}`" + (f", in `{location.function}`" if location.function else "")
    return f"{text}\n\n{_code_block(location.code, 'python')}" if location.code else text


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A table of GitHub's Markdown, in which a bar or a line end in a cell would end the cell or the row."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *cells])


def _code(text: object) -> str:
    """As inline code, nothing for nothing; a backtick inside needs a longer fence (CommonMark)."""
    shown = str(text)
    if not shown:
        return ""
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def _code_block(text: str, language: str = "") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def format_seconds(seconds: float) -> str:
    """ "7.8 µs", "1.25 ms", "3 s": three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def format_bytes(count: int) -> str:
    """ "512 B", "96.0 KiB", "1.5 MiB": binary units, as memory is counted."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable: the last unit always returns")
