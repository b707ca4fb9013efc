"""The rewriting of a graph, pass by pass: each analyses the graph as the one before has left it.

length tables   what the code makes of the length and of parameters is computed on the whole sequence, and sliced
by name         operators of this package, called or substituted, get their group
sorted rows     rows that are sorted, worked on one by one or by group, and sorted back, are left alone
scans           the bodies of scans are written out for all steps at once
loops backwards step loops that run from the end become loops over the flipped sequence
running maxima  the stabilisers of exponential gates are known for all tokens without the states
first tokens    loops that begin with the first token begin with zeros
collected sums  what the steps of a loop add up is put together, and summed once
loops           what the steps of a loop compute from their own tokens alone moves out of it
by meaning      regions that compute linear attention become the operator
last states     so do loops of which the last state alone is read
running sums    what remains of cumulative sums; other cumulative ops are taken for what they will be
close scans     scans that are still needed are as the user wrote them; of the others nothing is left
length          numbers that the code computes from the length get the whole one
shard           every other op that mixes positions gets what it needs, or is refused
verify          the result is analysed from nothing, and has to be right as it stands
snapshots       what is read of an input that the code then changes is kept for the backward
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile import second_look
from zeco_compile.debug import DebugDump
from zeco_compile.lowering import cost_model, symmetric, volume
from zeco_compile.lowering.links import GroupLinks
from zeco_compile.passes import (
    attention_calls,
    backward_loops,
    by_name,
    checkpoints,
    collected_sums,
    first_tokens,
    gather,
    gathered_keys,
    last_states,
    length,
    length_tables,
    loops,
    recognize,
    replacement,
    running_maxima,
    scans,
    shard,
    snapshots,
    sorted_rows,
    updates,
    verify,
)
from zeco_compile.passes.analysis import Analysis, analyse
from zeco_compile.passes.branches import Assumptions, assumptions
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.passes.inputs import graph_inputs
from zeco_compile.passes.masks import Buffer
from zeco_compile.passes.modes import refuse_hooks, refuse_inner_gradients
from zeco_compile.passes.plans import Ranks
from zeco_compile.passes.report import Communication, PassRecord, Report, Scan, op_name
from zeco_compile.passes.roles import NotLinearAttention
from zeco_compile.settings import Settings


@dataclass(frozen=True)
class Rewritten:
    """What has to be known of a rewritten graph at every call: the masks whose values were relied on, and the
    dimension of each output along the sequence (None where nothing was followed: one rank, or no sequence)."""

    masks: list[Buffer]
    output_dims: list[int | None] | None


@dataclass
class _Rewriting:
    """What the passes share: the graph, what it is rewritten for, and where they report."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    settings: Settings
    ranks: Ranks
    wiring: replacement.Wiring
    report: Report
    attempts: list[tuple[fx.Node, str]]
    masks: dict[int, Buffer]
    scans: list[scans.OpenScan] = field(default_factory=list)
    output_dims: list[int | None] | None = None
    look: second_look.SecondLook | None = None

    def analyse(self) -> Analysis | None:
        return analyse(self.gm, self.example_inputs, self.settings.seq_dim)

    def analyse_again(self) -> Analysis:
        """Once the graph has been rewritten within a pass."""
        self.gm.graph.lint()
        self.gm.recompile()
        analysis = self.analyse()
        assert analysis is not None, "the inputs are the same after every rewrite"
        return analysis


def ranks_of(settings: Settings) -> Ranks:
    return Ranks(settings.group, settings.rank, settings.world_size)


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    ranks: Ranks,
    report: Report,
    dump: DebugDump,
    assumed: Assumptions,
) -> Rewritten:
    """Rewrites `gm` in place for this rank. Raises the errors of passes/errors.py.

    `assumed` is what the trace took for granted of the length. Where the whole sequence breaks it, the trace for that
    has to be the same program, and what it takes for granted is added.
    """
    refuse_hooks(gm)
    refuse_inner_gradients(gm)
    _write_out(gm, ranks)
    wiring = replacement.Wiring(settings.schedule, settings.blocks or 0, ranks.group, ranks.world_size)
    work = _Rewriting(gm, example_inputs, settings, ranks, wiring, report, [], {})
    first = work.analyse()
    report.rank, report.world_size, report.group = ranks.rank, ranks.world_size, ranks.group
    if first is None:
        updates.write_in_updates(gm)
        return Rewritten([], None)  # no input runs along the sequence: everything is whole on every rank
    report.length = str(first.length)
    report.seq_inputs = {i.name: i.along for i in first.inputs if i.kind == "argument"}
    sharded = ranks.world_size > 1
    assumed_there: list[Assumptions] = []
    whole = first.real_length * ranks.world_size
    broken = assumed.broken(whole) if sharded else None
    passes = [(name, run) for name, run, alone in _FINDING if sharded or alone]
    passes += _SHARDING if sharded else ()
    passes.append(("snapshots", _snapshots))
    analysis: Analysis | None = first
    for name, run in passes:
        with report.recording(name, gm) as record:
            if analysis is None:
                analysis = work.analyse()
                assert analysis is not None, "the inputs are the same in every pass"
            another = isinstance(first.length, int) or broken is not None
            if name == "length" and work.look is None and another:
                work.look = _second_look(work, analysis, assumed_there)
            run(work, analysis, record)
            if record.matches:
                gm.graph.lint()
                gm.recompile()
                analysis = None
        dump.graph(f"after_{name}", gm)
    if work.look is not None:
        try:
            report.decisions += work.look.take_numbers()
            gm.recompile()
            work.look.compare()
        except LengthInValue as another_program:
            if broken is None:
                raise
            raise assumed.refusal(broken, whole) from another_program
        assumed.equal.append(assumed_there[-1])
    if updates.write_in_updates(gm):
        gm.recompile()
    return Rewritten(list(work.masks.values()), work.output_dims)


def _write_out(gm: fx.GraphModule, ranks: Ranks) -> None:
    """What Dynamo keeps in one node, or behind one, is in the graph itself."""
    checkpoints.inline_checkpoints(gm)
    if ranks.world_size > 1:
        attention_calls.take_apart(gm)
        updates.write_out_updates(gm)
    scans.with_gradients(gm)


def _second_look(work: _Rewriting, here: Analysis, assumed: list[Assumptions]) -> second_look.SecondLook:
    """A look at the model as a longer sequence has it; what the trace of that assumes is added to `assumed`."""

    def analyse_there(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Analysis:
        _write_out(gm, work.ranks)
        inputs = graph_inputs(gm, example_inputs, work.settings.seq_dim)
        assumed.append(assumptions(gm, inputs, example_inputs))
        again = replace(
            work,
            gm=gm,
            example_inputs=example_inputs,
            report=Report(),
            attempts=[],
            masks={},
            scans=[],
            look=None,
        )
        analysis: Analysis | None = None
        for name, run, _ in _FINDING:
            analysis = analysis or again.analyse()
            assert analysis is not None, "the inputs are the same, but for their length"
            record = PassRecord(name, 0.0, 0)
            run(again, analysis, record)
            if record.matches:
                gm.recompile()
                analysis = None
        analysis = analysis or again.analyse()
        assert analysis is not None, "the inputs are the same, but for their length"
        return analysis

    return second_look.SecondLook(
        work.gm,
        work.example_inputs,
        work.settings.seq_dim,
        work.ranks.world_size,
        not isinstance(here.length, int),
        here,
        analyse_there,
    )


def report_scans(report: Report, settings: Settings, ranks: Ranks, links: GroupLinks, wire: str) -> None:
    """Adds how the states of each region travel, what that sends, and what other ways to do the same would."""
    shared, own = symmetric.expected_wire(wire, links.hosts, settings.schedule), wire
    communication = []
    for region in report.regions:
        wire = own if region.family == "complex" else shared  # its kernel has no complex numbers
        schedule = "all_scan" if wire == "symmetric" else settings.schedule
        costs = links.costs[wire]
        sizes = region.sizes
        layer = volume.LayerSize(
            batch=sizes["B"],
            length=sizes["T"],
            heads=sizes["H"],
            key_dim=sizes["K"],
            value_dim=sizes["V"],
            decay_width=sizes["decay width"],
            value_bytes=sizes["bytes of v"],
            state_bytes=sizes["bytes of the state"],
        )
        rows, blocks = layer.key_dim, settings.blocks or 0
        if wire == "symmetric":
            # the kernel's blocks are its tiles, whatever was asked for
            rows = blocks = symmetric.tiles_of(layer.batch * layer.heads * layer.key_dim, layer.value_dim)
        plan = cost_model.plan(costs, links.hosts, layer.state, layer.decay, rows, schedule, blocks)
        report.scans.append(
            Scan(
                region.name,
                plan.schedule,
                plan.blocks,
                layer.state,
                plan.seconds,
                wire,
                len(set(links.hosts)),
                asdict(costs),
            )
        )
        for way, place in (("to the next rank", ranks.rank), ("to the previous rank", -1 - ranks.rank)):
            hosts = links.hosts if place >= 0 else links.hosts[::-1]
            sent = volume.schedule_bytes(
                plan.schedule, layer, place % ranks.world_size, ranks.world_size, hosts
            )
            communication.append(
                Communication(
                    f"{plan.schedule} of {region.name}, {'forward' if place >= 0 else 'backward'}",
                    way if plan.schedule != "lasp2" else "among all ranks",
                    f"B*H*K*V*{layer.state_bytes}" if plan.schedule in ("all_scan", "lasp1") else "",
                    sent,
                    1,
                    {
                        "all-gather of states": volume.gather_states_bytes(layer, ranks.world_size),
                        "all-gather of k and v": volume.gather_keys_and_values_bytes(layer, ranks.world_size),
                    },
                )
            )
    report.communication[:0] = communication


def operations(gm: fx.GraphModule) -> list[str]:
    """What the user's graph computes with, in order, and the numbers it is told; a callable without a name without its
    address."""
    shown = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            told = [
                repr(x) for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, int | float)
            ]
            shown.append(f"{op_name(node).partition(' at 0x')[0]}({', '.join(told)})")
    return shown


def decided(report: Report, operations: list[str]) -> dict[str, Any]:
    """What all ranks must have been given (`operations`) and decided alike."""
    return {
        "operations": operations,
        "regions": [[r.name, r.family, r.how, str(r.location), r.scale] for r in report.regions],
        "decisions": [[d.node, d.op, d.decision, str(d.location)] for d in report.decisions],
        "inputs": dict(report.seq_inputs),
        "options": {k: str(v) for k, v in report.settings.items() if k not in ("debug_dir", "group")},
    }


def _length_tables(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = length_tables.settle_length_tables(analysis, work.ranks, work.report.decisions)


def _by_name(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    found = by_name.wire_by_name(analysis, work.wiring, len(work.report.regions))
    work.report.regions += found
    record.matches = len(found)


def _sorted_rows(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = sorted_rows.settle_sorted_rows(analysis, work.report.decisions)


def _open_scans(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    work.scans, left = scans.open_scans(analysis)
    work.attempts += left
    record.matches = len(work.scans)


def _close_scans(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = scans.close_scans(analysis, work.scans, work.report.decisions, work.attempts)


def _backward_loops(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = backward_loops.turn_around(analysis, work.report.decisions)


def _running_maxima(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = running_maxima.lift_maxima(analysis, work.ranks, work.report.decisions)


def _first_tokens(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = first_tokens.begin_with_zeros(analysis, work.report.decisions)


def _collected_sums(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = collected_sums.collect_sums(analysis, work.report.decisions)


def _loops(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = loops.lift_steps(analysis, work.report.decisions)


def _by_meaning(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    _recognize(work, analysis, record)


def _last_states(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    """Loop behind loop: one may begin with what another has left behind."""
    tried: last_states.Tried = {}
    while opened := last_states.open_last_states(analysis, tried):
        before, known = record.matches, [node for node, _ in work.attempts]
        _recognize(work, work.analyse_again(), record, hopeless=known)
        last_states.close_last_states(work.gm.graph, opened, work.attempts)
        analysis = work.analyse_again()
        if record.matches > before:  # what is behind may be something now
            _recognize(work, analysis, record)
            analysis = work.analyse_again()
    record.matches += last_states.take_states_alone(work.gm.graph)


def _recognize(
    work: _Rewriting,
    analysis: Analysis,
    record: PassRecord,
    running_sums: bool = False,
    later: bool = False,
    hopeless: Container[fx.Node] = (),
) -> bool:
    """Whether running sums were left for later."""
    recognition = recognize.recognize(
        analysis,
        shard.will_be_handled(analysis),
        running_sums=running_sums,
        later=later,
        not_again=hopeless,
        otherwise=lambda user_node: gathered_keys.softmax_over_keys(analysis, user_node) is not None,
        at_last=lambda user_node: gathered_keys.over_all_keys(analysis, user_node) is not None,
        carried=shard.will_be_carried(analysis) if running_sums else lambda user_node: False,
    )
    if not running_sums:
        work.attempts += recognition.attempts
    for match in recognition.matches:
        try:
            region = replacement.replace_region(analysis, match, work.wiring, len(work.report.regions))
        except NotLinearAttention as why:
            work.attempts.append((analysis.shadow.origin[match.region.output], str(why)))
            continue
        if (left := replacement.left_behind(analysis, match)) is not None:
            work.attempts.append(left)
        work.report.regions.append(region)
        work.masks.update({mask.index: mask for mask in match.region.masks})
        record.matches += 1
    return recognition.later


def _running_sums(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    """Layer by layer: the sums of a second one may be those of a gate, which shows once the first has been found."""
    later = True
    hopeless: Container[fx.Node] = {node for node, why in work.attempts if why != recognize.RUNNING_SUM}
    while True:
        before = record.matches
        left = _recognize(work, analysis, record, running_sums=True, later=later, hopeless=hopeless)
        if not left:
            return
        if record.matches == before:
            later = False
            continue
        hopeless = ()  # what is behind those that have been found may be something now
        analysis = work.analyse_again()


def _length(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = length.globalise_length(analysis, work.ranks.world_size, work.report.decisions)


def _shard(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    _take_whole_length(work, analysis)
    gathers = work.settings.on_unsupported == "gather"
    if gathers:
        while shard.gather_one(analysis, work.ranks, work.report, gather.gather_region):
            record.matches += 1
            analysis = work.analyse_again()
            _take_whole_length(work, analysis)
    record.matches += shard.shard(
        analysis,
        work.ranks,
        work.report,
        attempts=work.attempts,
        fallback=None if gathers else gather.gather_region,  # what has been tried is no advice
    )


def _take_whole_length(work: _Rewriting, analysis: Analysis) -> None:
    """Let rules that need the whole sequence's own numbers ask the second trace for them, where the length is fixed."""
    if work.look is not None and isinstance(analysis.length, int) and analysis.length > 1:
        work.look.take_end_rows()
        analysis.at_whole_length = work.look.at_whole_length
        analysis.with_whole_numbers = work.look.taken


def _verify(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    work.output_dims = verify.verify(analysis)


def _snapshots(work: _Rewriting, analysis: Analysis, record: PassRecord) -> None:
    record.matches = snapshots.keep_read_values(analysis)


_Pass = Callable[[_Rewriting, Analysis, PassRecord], None]

_FINDING: tuple[tuple[str, _Pass, bool], ...] = (
    ("length_tables", _length_tables, False),
    ("by_name", _by_name, True),
    ("sorted_rows", _sorted_rows, True),
    ("scans", _open_scans, True),
    ("backward_loops", _backward_loops, True),
    ("running_maxima", _running_maxima, True),
    ("first_tokens", _first_tokens, True),
    ("collected_sums", _collected_sums, True),
    ("loops", _loops, True),
    ("by_meaning", _by_meaning, True),
    ("last_states", _last_states, True),
    ("running_sums", _running_sums, False),
    ("close_scans", _close_scans, True),
)
"""The passes that find what is linear attention, of the trace and of that for the whole sequence: the name, the pass,
and whether it runs on one rank too."""

_SHARDING: tuple[tuple[str, _Pass], ...] = (("length", _length), ("shard", _shard), ("verify", _verify))
"""The passes that make everything else right where several ranks share the sequence."""
