"""Finds gated linear attention in the user's graph, by meaning, and puts one operator in its place.

Contract: a region is rewritten only if its output equals the recurrence of DESIGN's kind in float64 on random
values, at every size tried, and the operator that is wired gets exactly the values that were checked. Whatever
does not pass stays as it is; `verify` refuses it later if nothing else makes it right.

    for each user node whose result is MIXED, in order:
        cut the region that ends there
        find roles (roles.py); check each hypothesis against the recurrence at several sizes
        the first that passes: its output is LOCAL from here on
    then, for each region found: insert the operator behind its last node, redirect the readers, erase the rest
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State, assign_states
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.checkpoints import keep_if_any
from zeco_compile.passes.complex_recurrences import (
    ComplexRoles,
    emit_recurrence,
    final_complex_state_scale,
    find_complex_roles,
    is_complex,
)
from zeco_compile.passes.layout import Canonical, CanonicalAxes, GraphOperations, arrange, disarrange
from zeco_compile.passes.length import depends_on
from zeco_compile.passes.linearity import first_not_affine
from zeco_compile.passes.locations import expression, user_location
from zeco_compile.passes.modes import modes, reason_against, without_gradient
from zeco_compile.passes.plans import settle
from zeco_compile.passes.readers import reader_of_erased_writes, readers_behind
from zeco_compile.passes.region import (
    INSIDE,
    CannotEvaluate,
    Region,
    Sizes,
    carrying,
    carrying_beyond,
    cut_region,
    from_undecayed_state,
    largest_constant,
    piecewise,
    rounds,
    same_value,
    tolerance,
    with_common_sources,
    with_taken_buffers,
)
from zeco_compile.passes.report import Region as RegionReport
from zeco_compile.passes.report import Role, op_name
from zeco_compile.passes.roles import (
    GATE_FORMS,
    GateForm,
    NotLinearAttention,
    OwnTerm,
    Roles,
    Trials,
    check,
    final_state_scale,
    find_roles,
    own_weight,
    row_factor,
)
from zeco_compile.passes.schema import WRITES, following, operand
from zeco_compile.passes.shift_invariance import depends_on_place

log = logging.getLogger(__name__)

aten = torch.ops.aten

MOST_INPUTS = 12
"""A region with more inputs than this is no attention, but half a model behind something not recognised."""

_FAR = 300
"""A length at which every region is checked too: what is limited to a window shows, however it was written."""

_MOST_ELEMENTS = 3e7
"""Elements of all values of a region up to which it is probed at the model's own sizes."""


@dataclass(frozen=True)
class Match:
    """A region, the roles that passed, and the checks they passed."""

    region: Region
    roles: Roles | ComplexRoles
    error: float
    sizes: tuple[str, ...]
    length_factor: tuple[fx.Node, bool] | None = None
    """A number from the length that the result is divided by, or multiplied with (False, True), besides the scale."""
    detached: bool = False
    """No gradient gets past a `detach` in it: the result has none."""


@dataclass
class Recognition:
    """What was found in one graph. `attempts` are the regions that were tried and why they are none."""

    matches: list[Match] = field(default_factory=list)
    attempts: list[tuple[fx.Node, str]] = field(default_factory=list)
    later: bool = False
    """Running sums were left for later, which are computed from what has been found."""


RUNNING_SUM = "a running sum, which may be a part of something larger"


def recognize(
    analysis: Analysis,
    handled: Callable[[fx.Node], bool],
    *,
    running_sums: bool = False,
    later: bool = False,
    not_again: Container[fx.Node] = (),
    otherwise: Callable[[fx.Node], bool] = lambda user_node: False,
    carried: Callable[[fx.Node], bool] = lambda user_node: False,
    at_last: Callable[[fx.Node], bool] = lambda user_node: False,
) -> Recognition:
    """All regions, none overlapping. Fills `analysis.states`.

    A running sum is linear attention too (q = k = 1, no decay), but most are a part of something larger, the sums
    of a gate above all. They are taken with `running_sums` only, once all else has been found; with `later` only those
    that are not computed from what is found now, since behind that they may be part of something, too. Nodes of the
    user's graph where it is known already that no region ends are passed over: `not_again`, unless they are computed
    from what has been found since, as a second layer is. So are those where something else ends that will be made right
    (softmax attention): `otherwise`; and what is no region may end something else, too: `at_last`. What is `carried`
    from rank to rank counts as found now; a cumulative sum does where it is no running sum that the operator computes.
    """
    found = Recognition()
    behind = set[fx.Node]()  # computed from what has been found now

    def carry(user_node: fx.Node) -> bool:
        if not carried(user_node):
            return False
        for node in analysis.escapes(user_node):
            behind.update(following(list(node.users)))
        return True

    def settle(user_node: fx.Node) -> bool:
        summed = any(n.target is aten.cumsum.default for n in analysis.shadow.groups[user_node])
        if otherwise(user_node) or (not summed and carry(user_node)):
            return True
        waits = later and any(node in behind for node in analysis.shadow.groups[user_node])
        outputs = [n for n in analysis.escapes(user_node) if _is_exit(analysis, n)]
        if len(outputs) != 1 or (user_node in not_again and outputs[0] not in behind):
            return summed and not waits and carry(user_node)
        match, reason = _match(analysis, outputs[0], running_sums and not waits)
        if match is None and waits and (summed or reason == RUNNING_SUM):
            found.later = True
            return False
        if match is None:
            found.attempts.append((user_node, reason))
            log.debug("no linear attention ends at %s: %s", user_node, reason)
            return (summed and carry(user_node)) or at_last(user_node)
        found.matches.append(match)
        if not_again or later:
            behind.update(following(list(outputs[0].users)))
        log.info("linear attention (%s) at %s", match.roles.family, user_location(user_node))
        return True

    assign_states(analysis, handled, settle)
    return found


def _is_exit(analysis: Analysis, node: fx.Node) -> bool:
    """A MIXED value with one whole sequence axis that others read; not a buffer to whose rows more is written."""
    value = node.meta.get("val")
    if analysis.state(node) is not State.MIXED or not isinstance(value, torch.Tensor):
        return False
    if value.dtype is torch.bool:
        return False
    group = analysis.user_node(node)
    if group is not None and group.meta.get(INSIDE):
        return False
    if not _has_all_rows(analysis, node) or analysis.is_misaligned(node):
        return False
    if any(user.target in WRITES and operand(user, 0) is node for user in node.users):
        # one step of many that write their rows into it
        return any(analysis.own_mixing(user) == [] for user in node.users if user.target not in WRITES)
    return any(analysis.user_node(user) is not group or user.op == "output" for user in node.users)


def _has_all_rows(analysis: Analysis, node: fx.Node) -> bool:
    """One dimension runs along the sequence, and has all rows: not the chunks without the rows of each."""
    axes, along = analysis.track.axes, analysis.track.sequence_dims(node)
    if len(along) != 1:
        return False
    atoms = tuple(a for a in axes.flat(analysis.track.dims(node)[along[0]]) if a.sequence)
    return axes.is_whole_sequence(atoms)


def _match(analysis: Analysis, output: fx.Node, running_sums: bool) -> tuple[Match | None, str]:
    reason = ""
    tried: set[tuple[fx.Node, ...]] = set()
    for region in _readings(analysis, output):
        if region.inputs not in tried:
            tried.add(region.inputs)
            match, why = _match_region(analysis, region, running_sums)
            if match is not None:
                return match, ""
            reason = reason or why
    return None, reason or "it has too many inputs, or one that is no value of each position"


def _readings(analysis: Analysis, output: fx.Node) -> Iterator[Region]:
    """Where the region may be said to begin: at the nearest local values, or further up."""
    for beyond_sums in (False, True):
        cut = cut_region(analysis, output, MOST_INPUTS, beyond_sums=beyond_sums)
        if cut is not None:
            nothing = with_common_sources(cut, analysis, through="nothing")
            yield nothing
            yield with_common_sources(cut, analysis, through="views")
            yield with_common_sources(cut, analysis, through="functions")
            yield with_taken_buffers(nothing, analysis)


def _match_region(analysis: Analysis, region: Region, running_sums: bool) -> tuple[Match | None, str]:
    complex_numbers = is_complex(region)
    if complex_numbers:
        region = from_undecayed_state(region, analysis)
    end = analysis.shadow.origin[region.output]
    stops = without_gradient(analysis, region.interior, region.output)
    if (against := reason_against(analysis, [n for n in region.interior if n not in stops], end)) is not None:
        return None, against
    whole, analysis = analysis, analysis.of_region(region.inputs, region.interior)
    if not _has_all_rows(analysis, region.output):
        return None, "by itself it does not show which rows of its result belong to which positions"
    rounded = _rounded_inside(region, analysis)
    if rounded is not None:
        return None, (
            f"{analysis.described(rounded)} in it is {rounded.meta['val'].dtype}, though the result "
            "is float64: what the code rounds on the way would not be rounded in the operator"
        )
    reason = "no way to read its inputs as q, k, v and a gate fits the recurrence"
    variants = [(region, analysis)]
    of_one_piece: Iterator[Roles] | None = None
    if piecewise(region, analysis):
        try:
            if analysis.length > 2 and not complex_numbers:
                # what one piece shows already need not be found out again for each variant
                hypotheses = find_roles(region, analysis, _affordable(region, analysis, analysis.length))
                of_one_piece = itertools.chain([*itertools.islice(hypotheses, 1)], hypotheses)
        except (NotLinearAttention, CannotEvaluate) as why:
            return None, str(why)
        beyond = [
            (each, whole.of_region(each.inputs, each.interior))
            for each in carrying_beyond(region, whole)
            if reason_against(whole, each.interior, end) is None
        ]
        inside = [(each, analysis) for each in carrying(region, analysis)]
        variants = [*beyond, *inside, (region, analysis)]
    # what is made ready to be run at these is ready for all variants
    sizes_of: dict[tuple[int, bool], list[Sizes]] = {}
    for variant, analysis in variants:
        key = id(analysis), variant.final_state is None
        try:
            if key not in sizes_of:
                sizes_of[key] = _probe_sizes(variant, analysis)
            first, *rest = sizes_of[key]
            if complex_numbers:
                found, error = find_complex_roles(variant, analysis, (first, *rest))
                for node in found.inputs:
                    _refuse_not_affine(variant, analysis, node, powers=node in found.decays)
                return Match(variant, found, error, _described(first, *rest), detached=bool(stops)), ""
            if variant is not region and depends_on_place(variant, analysis, first):
                continue
            trials = Trials(variant, analysis)
            known = of_one_piece if variant is region else None
            for roles in known or find_roles(variant, analysis, first):
                if roles.is_running_sum and not running_sums:
                    reason = RUNNING_SUM
                    continue
                match = _checked(trials, roles, (first, *rest))
                if match is not None:
                    for node in _linear_inputs(roles):
                        _refuse_not_affine(variant, analysis, node)
                    return replace(match, detached=bool(stops)), ""
        except (NotLinearAttention, CannotEvaluate) as why:
            reason = str(why)
    return None, reason


def _linear_inputs(roles: Roles) -> list[fx.Node]:
    """The inputs that the region is said to be affine in: all but gates, and those that a function of enters."""
    others = {node for node, _ in (*roles.gates, *roles.entering)}
    own = roles.own.inputs if roles.own is not None else ()
    initial = () if roles.initial_state is None else (roles.initial_state,)
    return [n for n in dict.fromkeys((*roles.v, *roles.k, *roles.q, *own, *initial)) if n not in others]


def _refuse_not_affine(region: Region, analysis: Analysis, node: fx.Node, *, powers: bool = False) -> None:
    """Raises NotLinearAttention where the numbers that were tried do not show what an op does to others."""
    bends = first_not_affine(region, analysis, node, powers=powers)
    if bends is not None:
        raise NotLinearAttention(
            f"{analysis.described(bends)} in it depends on {analysis.described(node)} by an op that is not linear for "
            "all numbers, though it was for those tried"
        )


_WIDEST = (torch.float64, torch.complex128)
_ROUNDING = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def _rounded_inside(region: Region, analysis: Analysis) -> fx.Node | None:
    """A value of less precision inside of a float64 region: `gamma ** (i - j)` makes float32 of whole numbers."""
    if region.output.meta["val"].dtype not in _WIDEST:
        return None
    for node in region.interior:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in _ROUNDING:
            used_wider = any(
                isinstance(user.meta.get("val"), torch.Tensor) and user.meta["val"].dtype in _WIDEST
                for user in node.users
            )
            try:
                if used_wider and value.dim() and rounds(region, analysis, node):
                    return node
            except CannotEvaluate:
                return node
    return None


def _checked(trials: Trials, roles: Roles, sizes: Sequence[Sizes]) -> Match | None:
    """The match if the region is the recurrence, up to one constant scale, at all of `sizes`."""
    region, analysis = trials.region, trials.analysis
    worst, scales = 0.0, []
    allowed = tolerance(region)
    if roles.own is not None and roles.own.weight is None:
        try:
            weight = own_weight(trials, roles, sizes[0], _FIRST_SEED)
        except CannotEvaluate:
            return None
        if weight is None:
            return None
        weight = 1.0 if abs(weight - 1.0) <= allowed else _rounded(weight)
        return _checked(trials, replace(roles, own=replace(roles.own, weight=weight)), sizes)
    for seed, at in enumerate(sizes, start=_FIRST_SEED):
        try:
            scale, difference = check(trials, roles, at, seed)
        except CannotEvaluate:
            return None
        if not difference <= allowed or scale == 0.0:
            rows = row_factor(trials, roles, at, seed) if seed == _FIRST_SEED else None
            if rows is None or roles.rows is not None:
                return None
            return _checked(trials, replace(roles, rows=rows), sizes)
        worst = max(worst, difference)
        scales.append(scale)
    for extreme in (1, 2) if roles.entering else (1,):
        try:
            scale, difference = check(trials, roles, sizes[0], seed=7, extreme=extreme)
        except CannotEvaluate:
            return None
        if not difference <= allowed:
            return None  # a limit that ordinary values do not reach: clipped scores, a clamped exponent
        if extreme == 1:
            scales.append(scale)
        elif not _constant((*scales[-1:], scale), allowed):
            return None
    factor = None
    if not _constant(scales, allowed):
        lengths = [at.length for at in (*sizes, sizes[0])]
        found = _length_factor(region, analysis, lengths, scales, allowed)
        if found is None:
            return None  # a factor that depends on the length in an unknown way is no scale
        factor, scales = found
    scale = _rounded(scales[0])
    if roles.constant is not None and abs(scale - 1.0) <= allowed:
        scale = 1.0  # decays that the code has computed in float32 are found as exactly as they are
    return Match(region, replace(roles, scale=scale), worst, _described(*sizes), factor)


def _described(*sizes: Sizes) -> tuple[str, ...]:
    return tuple(f"T = {at.length}" + (" (other sizes reduced)" if at.other else "") for at in sizes)


_FIRST_SEED = 11


def _constant(scales: Sequence[float], allowed: float) -> bool:
    return max(scales) - min(scales) <= allowed * abs(scales[0])


def _length_factor(
    region: Region, analysis: Analysis, lengths: Sequence[int], scales: Sequence[float], allowed: float
) -> tuple[tuple[fx.Node, bool], list[float]] | None:
    """The number in the user's code that makes the scale depend on the length, whether it is multiplied with, and
    what is left of the scales without it: `scores / x.shape[1]`. None if it is not one such number."""
    if isinstance(analysis.length, int) or len(set(lengths)) < _FEWEST_LENGTHS:
        return None
    symbols = analysis.length.free_symbols
    numbers = dict.fromkeys(
        n for user in region.user_nodes for n in user.all_input_nodes if depends_on(n, symbols)
    )
    for number in numbers:
        expression = number.meta["example_value"].node.expr
        values = [expression.xreplace(dict.fromkeys(symbols, sympy.Integer(t))) for t in lengths]
        if not all(value.is_number and value.is_positive for value in values):
            continue
        for multiplied in (False, True):
            pairs = zip(scales, map(float, values), strict=True)
            left = [scale / value if multiplied else scale * value for scale, value in pairs]
            if _constant(left, allowed):
                return (number, multiplied), left
    return None


_FEWEST_LENGTHS = 3


def _rounded(scale: float) -> float:
    """Without the last digits, which are the check's rounding and not the user's."""
    return float(f"{scale:.12g}")


def _probe_sizes(region: Region, analysis: Analysis) -> list[Sizes]:
    """Lengths that differ from each other, reach beyond every constant of the region, and are affordable."""
    if piecewise(region, analysis):
        length = analysis.length
        if region.final_state is None:
            if length < 3:
                raise NotLinearAttention(
                    f"a loop over {length} token(s) from a state that is not made of zeros does not show how it "
                    "goes on: give each rank at least 3 tokens"
                )
            return [_affordable(region, analysis, length)]
        pieces = max(2, -(-6 // length))
        return [_affordable(region, analysis, length * pieces)]
    beyond = largest_constant(region.interior) + 3
    if beyond > 2048:
        raise NotLinearAttention(f"the number {beyond - 3} in it is too large to be probed beyond")
    most = max(beyond + 11, _FAR)
    rows = min((m.rows for m in region.masks), default=most) if _looks_up_rows(region, analysis) else most
    wanted = [t for t in (min(7, rows), 4, min(max(11, beyond), rows), min(_FAR, rows)) if t <= rows]
    lengths = dict.fromkeys(_admitted(analysis, t, rows) for t in wanted)
    return [_affordable(region, analysis, t) for t in lengths]


def _looks_up_rows(region: Region, analysis: Analysis) -> bool:
    """A buffer has a row for each position, and so for so many only. Decays of heads have none."""
    along = any(analysis.track.sequence_dims(buffer) for buffer in region.masks_at)
    return along or any(map(analysis.is_table_lookup, region.interior))


def _admitted(analysis: Analysis, length: int, most: int) -> int:
    """The next length from this one on for which the trace holds: a multiple of the chunk, where there are chunks."""
    if isinstance(analysis.length, int) or not analysis.length.is_Symbol:
        return length
    found = next(analysis.track.axes.facts.values_of(analysis.length, length), length)
    return found if found <= max(most, length + _FAR) else length


def _affordable(region: Region, analysis: Analysis, length: int) -> Sizes:
    plain = Sizes(analysis, length)
    if _elements(region, plain) <= _MOST_ELEMENTS:
        return plain
    small: dict[Atom, int] = {}
    axes = analysis.track.axes
    for node in (*region.inputs, region.output):
        for dim in analysis.track.dims(node):
            for atom in axes.flat(dim):
                if not atom.sequence and isinstance(atom.size, int) and atom.size > 5:
                    small.setdefault(atom, 2 + len(small) % 4)
    reduced = Sizes(analysis, length, small)
    if _elements(region, reduced) > 20 * _MOST_ELEMENTS:
        raise NotLinearAttention("it is too large to be computed for a check")
    return reduced


def _elements(region: Region, sizes: Sizes) -> float:
    total = 0.0
    for node in region.interior:
        if isinstance(node.meta.get("val"), torch.Tensor):
            count = 1.0
            for dim in analysis_dims(sizes.analysis, node):
                count *= sizes.of_dim(dim)
            total += count
    return total


def analysis_dims(analysis: Analysis, node: fx.Node) -> tuple[tuple[Atom, ...], ...]:
    return analysis.track.dims(node)


# -------------------------------------------------------------------------------------------------- the rewrite


@dataclass(frozen=True)
class Wiring:
    """How the operator is called: the group that shares the sequence and the schedule of the exchange."""

    schedule: str
    blocks: int
    group: str
    world_size: int


def rewrite(analysis: Analysis, match: Match, wiring: Wiring, number: int) -> RegionReport:
    """Puts the operator into the user's graph in place of the region, and reports what was done.

    Raises NotLinearAttention where a value that the operator needs is no longer there under any name, because
    the user's code has overwritten it.
    """
    shadow, graph = analysis.shadow, analysis.gm.graph
    region, roles = match.region, match.roles
    end = _end(analysis, region)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = readers_behind(shadow, region.output, order[end], order)
    if found is None:
        raise NotLinearAttention("its result is written to, and read under a name from before")
    readers, written_to = found
    if not readers:
        raise NotLinearAttention("nothing reads its result under a name of its own")
    state_readers, state_scale = _state_readers(analysis, match, order), 1.0
    place = _place(state_readers, order, end)
    state_readers = [each for each in state_readers if order[each[0]] > order[place]]
    if state_readers and match.detached:
        raise NotLinearAttention("its result has no gradient, and the state that is read has one")
    if state_readers:
        if isinstance(roles, ComplexRoles):
            scale = final_complex_state_scale(region, roles.axes.analysis, roles)
        else:
            scale = final_state_scale(region, roles.axes.analysis, roles)
        if scale is None:
            raise NotLinearAttention(
                "what it leaves behind for the next call is not the state of the recurrence"
            )
        state_scale = _rounded(scale)
    gate: _Gate = (None, None, None)
    if isinstance(roles, ComplexRoles):
        needed = list(roles.inputs)
    else:
        gate = _gate_source(analysis, roles)
        needed = _needed(roles, gate)
    # What an operator has taken the place of is held by its result, and not under the old name any more.
    held = {
        value: shadow.rewritten.get(value, holder)
        for value, holder in shadow.holders(order, order[place]).items()
        if order.get(shadow.rewritten.get(value, holder), len(order)) <= order[place]
    }
    for node in needed:
        if node not in held:
            raise NotLinearAttention(
                f"the value {analysis.described(node)} that it needs has been overwritten by then"
            )
    values = {node: held[node] for node in needed}
    kept, redirected = list(values.values()), [*readers, *state_readers]
    stale = reader_of_erased_writes(shadow, graph, region.user_nodes, redirected, kept, order)
    if stale is not None:
        name = expression(stale, op_name(stale))
        raise NotLinearAttention(f"{name} reads what it writes under another name")
    dtype = region.output.meta["val"].dtype
    if isinstance(roles, Roles):
        dtype = _promoted([*roles.q, *roles.k, *roles.v], dtype)

    with graph.inserting_after(place):
        anchor = graph.call_function(aten.sym_size.int, (values[needed[0]], 0))
    with graph.inserting_before(anchor):
        ops = GraphOperations(
            graph,
            lambda atom: _size_source(roles.axes, values, atom),
            next(iter(values.values())),
            dtype,
            end,
        )
        if isinstance(roles, ComplexRoles):
            wired = wiring.schedule, wiring.blocks, wiring.group
            call, o, last = emit_recurrence(ops, roles, values, bool(state_readers), wired)
        else:
            call, o, last = _emit_attention(ops, match, roles, gate, values, bool(state_readers), wiring)
        keep_if_any(call, region.user_nodes)
        if match.detached:
            o = ops.call(aten.detach.default, o)
        if written_to:  # its backward may need what it returned
            o = ops.call(aten.clone.default, o)
        if state_readers and region.final_state is not None:
            last = disarrange(ops, roles.axes, last, Canonical.STATE, region.final_state)
            last = last if state_scale == 1.0 else ops.call(aten.mul.Tensor, last, state_scale)
            last = ops.call(aten.to.dtype, last, region.final_state.meta["val"].dtype)
    graph.erase_node(anchor)
    shadow.rewritten[region.output] = o
    if state_readers and region.final_state is not None:
        shadow.rewritten[region.final_state] = last
    for user, argument in readers:
        shadow.rewritten.update(dict.fromkeys(shadow.tensors_read(user, argument), o))  # written to, others
        user.replace_input_with(argument, o)
    for user, argument in state_readers:
        user.replace_input_with(argument, last)
    _erase(analysis, region)
    return _report(analysis, match, number, gate)


_Gate = tuple[fx.Node | None, GateForm | None, fx.Node | None]
"""What `_gate_source` gives."""


def _needed(roles: Roles, gate: _Gate) -> list[fx.Node]:
    """The values that the operator is made from."""
    needed = [*roles.q, *roles.k, *roles.v, *(node for node in (gate[0], gate[2]) if node is not None)]
    needed += [node for node, _ in roles.gates[1:]]
    needed += roles.own.inputs if roles.own is not None else ()
    if roles.initial_state is not None:
        needed.append(roles.initial_state)
    return needed


def _emit_attention(
    ops: GraphOperations,
    match: Match,
    roles: Roles,
    gate: _Gate,
    values: dict[fx.Node, fx.Node],
    final_state: bool,
    wiring: Wiring,
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(the operator, the region's output, the state after the last step in the operator's layout) at the graph's
    insertion point."""
    gate_node, gate_form, kept = gate
    seconds = roles.gates[1:]
    dtype, operand_dtype = match.region.output.meta["val"].dtype, ops.dtype
    for node, entrance in roles.entering:
        values[node] = ops.call(_ENTERED[entrance.name], values[node])
    q = arrange(ops, roles.axes, Canonical.KEY, roles.q, values)
    k = arrange(ops, roles.axes, Canonical.KEY, roles.k, values)
    v = arrange(ops, roles.axes, Canonical.VALUE, roles.v, values)
    q, k, v = (_as(ops, x, nodes, operand_dtype) for x, nodes in ((q, roles.q), (k, roles.k), (v, roles.v)))
    g = None
    if gate_node is not None and gate_form is not None:
        log = _emit_gate(ops, gate_form, values[gate_node], wiring.group)
        if kept is not None:
            log = ops.call(torch.where, values[kept], log, -float("inf"))
        logs = {gate_node: log}
        g = arrange(ops, roles.axes, Canonical.GATE, [gate_node], logs)
        for node, form in seconds:
            log_too = {node: _emit_gate(ops, form, values[node], wiring.group)}
            g = ops.call(torch.add, g, arrange(ops, roles.axes, Canonical.GATE, [node], log_too))
        if roles.write_factor is not None:
            factor = {gate_node: _emit_write_factor(ops, roles.write_factor, logs[gate_node])}
            k = ops.multiply(k, arrange(ops, roles.axes, Canonical.KEY, [gate_node], factor))
            k = k if operand_dtype == dtype else ops.call(aten.to.dtype, k, operand_dtype)
    elif roles.constant is not None:
        like = next(iter(values.values()))
        state_dtype = torch.float64 if operand_dtype == torch.float64 else torch.float32
        heads = [
            ops.call(aten.new_full.default, like, [1], each, dtype=state_dtype) for each in roles.constant
        ]
        for each in heads:
            each.meta["zeco_fitted"] = True
        g = heads[0] if len(heads) == 1 else ops.call(torch.cat, heads)
    written = k, v, g
    if roles.before is not None:
        # What is the same at all positions has no row to be moved; one of both has.
        along = roles.axes.analysis.track.sequence_dims
        if roles.write_factor is not None or any(map(along, roles.k)):
            k = _one_later(ops, k, wiring.group)
        if any(map(along, roles.v)):
            v = _one_later(ops, v, wiring.group)
        if g is not None and roles.before == "kept":
            if roles.initial_state is not None and not roles.axes.gate_has_rows:
                # what it begins with is read as it is
                in_rows = k if any(map(along, roles.k)) else v
                g = _one_later(ops, _with_rows(ops, roles, g, in_rows), wiring.group)
            elif roles.axes.gate_has_rows:
                g = _one_later(ops, g, wiring.group)
        elif g is not None:
            decay = ops.call(torch.exp, g)
            if not roles.axes.gate_has_key:
                decay = ops.unsqueeze(decay, 1 if roles.constant is not None else 3)
            k = ops.call(aten.to.dtype, ops.multiply(k, decay), operand_dtype)
    state = None
    if roles.initial_state is not None:
        state = arrange(ops, roles.axes, Canonical.STATE, [roles.initial_state], values)
    call = ops.call(
        torch.ops.zeco.gated_linear_attention.default,
        q, k, v, g, roles.scale, state, final_state, wiring.schedule, wiring.blocks, wiring.group,
    )  # fmt: skip
    o = ops.call(operator.getitem, call, 0)
    if roles.rows is not None:
        float_dtype = torch.promote_types(operand_dtype, torch.float32)
        o = roles.rows.emit(ops, o, ops.size((roles.axes.rows,)), g, float_dtype)
        o = o if float_dtype == operand_dtype else ops.call(aten.to.dtype, o, operand_dtype)
    if roles.own is not None:
        o = _with_own_term(
            ops, roles, roles.own, o, values, torch.promote_types(operand_dtype, torch.float32)
        )
        o = ops.call(aten.to.dtype, o, operand_dtype)
    o = disarrange(ops, roles.axes, o)
    if match.length_factor is not None:  # of the slice's length as yet, as the user's own (length.py)
        from_length, multiplied = match.length_factor
        o = ops.call(torch.mul if multiplied else torch.div, o, from_length)
    if operand_dtype != dtype:
        o = ops.call(aten.to.dtype, o, dtype)
    last = o  # there are no readers of the state otherwise
    if final_state:
        last = ops.call(operator.getitem, call, 1)
        if roles.before is not None:
            last = _after_last_write(ops, roles, last, written, wiring)
    return call, o, last


_ENTERED = {"exp(z)": torch.exp, "1 / z": torch.reciprocal}
"""`roles.ENTRANCES` in the user's graph."""


def _one_later(ops: GraphOperations, x: fx.Node, group: str) -> fx.Node:
    """[B, T, ...] with each row at the next position: the first is the last one of the rank before, zeros at rank 0."""
    rows = ops.call(torch.ops.zeco.halo.default, x, 1, 1, 0, 0.0, group)
    return ops.call(aten.slice.Tensor, rows, 1, 0, -1)


def _with_rows(ops: GraphOperations, roles: Roles, g: fx.Node, in_rows: fx.Node) -> fx.Node:
    """A gate that is the same at all positions, with a row for each, [B, T, H] or [B, T, H, K]."""
    rows = ops.call(aten.zeros_like.default, ops.call(aten.select.int, in_rows, 3, 0))
    return ops.call(torch.add, ops.unsqueeze(rows, 3) if roles.axes.gate_has_key else rows, g)


def _after_last_write(
    ops: GraphOperations,
    roles: Roles,
    state: fx.Node,
    written: tuple[fx.Node, fx.Node, fx.Node | None],
    wiring: Wiring,
) -> fx.Node:
    """[B, H, K, V] behind the last token of the sequence, from the state that it reads and the k, v and gate of all."""
    k, v, g = written
    dtype = torch.promote_types(ops.dtype, torch.float32)
    k, v = (ops.call(aten.to.dtype, _of_last_token(ops, x, wiring), dtype) for x in (k, v))
    if g is not None and roles.before == "kept":
        decay = g if roles.constant is not None else _of_last_token(ops, g, wiring)
        decay = ops.call(torch.exp, ops.call(aten.to.dtype, decay, dtype))
        if not roles.axes.gate_has_key:
            decay = ops.unsqueeze(decay, -1)
        state = ops.multiply(state, ops.unsqueeze(decay, -1))
    return ops.call(torch.add, state, ops.multiply(ops.unsqueeze(k, -1), ops.unsqueeze(v, -2)))


def _of_last_token(ops: GraphOperations, x: fx.Node, wiring: Wiring) -> fx.Node:
    """[B, H, ...] of [B, T, H, ...], equal on every rank."""
    row = ops.call(aten.select.int, x, 1, -1)
    settle(row)
    return ops.call(torch.ops.zeco.from_rank.default, row, wiring.world_size - 1, wiring.group)


def _with_own_term(
    ops: GraphOperations,
    roles: Roles,
    own: OwnTerm,
    o: fx.Node,
    values: dict[fx.Node, fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """`o`, [B, T, H, V], and the own term, in at least the precision of a state."""
    wide = {node: ops.call(aten.to.dtype, values[node], dtype) for node in own.inputs}
    of_keys, term = own.arranged(ops, roles.axes, wide)
    if of_keys is not None:
        term = ops.multiply(ops.call(aten.sum.dim_IntList, of_keys, [-1], True), term)
    assert own.weight is not None, "it has been measured"
    weight = own.weight * roles.scale
    term = term if weight == 1.0 else ops.call(aten.mul.Tensor, term, weight)
    return ops.call(aten.add.Tensor, ops.call(aten.to.dtype, o, dtype), term)


def _as(ops: GraphOperations, x: fx.Node, nodes: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    made = _promoted(nodes, dtype)
    return x if made == dtype else ops.call(aten.to.dtype, x, dtype)


def _promoted(nodes: Sequence[fx.Node], default: torch.dtype) -> torch.dtype:
    dtype = None
    for node in nodes:
        own = node.meta["val"].dtype
        dtype = own if dtype is None else torch.promote_types(dtype, own)
    return default if dtype is None else dtype


def _size_source(axes: CanonicalAxes, values: dict[fx.Node, fx.Node], atom: Atom) -> tuple[fx.Node, int]:
    analysis = axes.analysis
    for aten_node, user_node in values.items():
        for i, dim in enumerate(analysis.track.dims(aten_node)):
            if analysis.track.axes.flat(dim) == (atom,) or (
                atom is axes.rows and analysis.track.axes.is_whole_sequence(dim)
            ):
                return user_node, i
    raise NotLinearAttention(f"no input has a dimension of the symbolic size {atom.size} by itself")


def _gate_source(analysis: Analysis, roles: Roles) -> _Gate:
    """The gate's input, or what it was computed from: the log decay under an `exp`, the logits under a sigmoid. And
    where the state is kept, if the decay is that times a mask (`a * ~reset`): elsewhere the log decay is -inf.

    The decay itself may be zero where its logarithm is an ordinary number.
    """
    node, form = roles.gate, roles.form
    if node is None or form is None or form.name != "log(a)":
        return node, form, None
    end = analysis.shadow.origin[roles.axes.output]
    current = _before_views(node)
    passed, found, kept = [node, current], node, None
    if (masked := _times_a_mask(current)) is not None and all(_has_a_name(analysis, each) for each in masked):
        found, kept = masked
        current = _before_views(found)
        passed += [found, current]
    forms = {f.name: f for f in GATE_FORMS}
    under: dict[Any, GateForm] = {aten.exp.default: forms["g"], aten.sigmoid.default: forms["logsigmoid(z)"]}
    inner, same = under.get(current.target), found is node or current is found
    if inner is not None and same and isinstance(current.args[0], fx.Node):
        source = current.args[0]
        if _has_a_name(analysis, source) and reason_against(analysis, passed, end) is None:
            return source, inner, kept
    if kept is not None and reason_against(analysis, passed, end) is None:
        return found, form, kept
    return node, form, None


def _before_views(node: fx.Node) -> fx.Node:
    views = ("view", "_unsafe_view", "permute", "transpose", "unsqueeze", "squeeze", "clone", "expand", "t")
    while getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in views:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _times_a_mask(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a product multiplies with a mask, and the mask, of true and false."""
    if node.target is not aten.mul.Tensor:
        return None
    factors = [n for n in node.args if isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor)]
    masks = [n for n in factors if n.meta["val"].dtype is torch.bool]
    others = [n for n in factors if n not in masks and n.meta["val"].shape == node.meta["val"].shape]
    return (others[0], masks[0]) if len(masks) == len(others) == 1 else None


def _has_a_name(analysis: Analysis, node: fx.Node) -> bool:
    """The value is that of a node of the user's graph."""
    user_node = analysis.shadow.origin.get(node)
    return node.op == "placeholder" or (
        user_node is not None and node in analysis.shadow.tensors_made(user_node)
    )


def _emit_gate(ops: GraphOperations, form: GateForm, z: fx.Node, group: str) -> fx.Node:
    """The log decay in the user's graph."""
    call = ops.call
    if form.name == "g":
        return z
    if form.name == "-g":
        return call(torch.neg, z)
    if form.name == "logsigmoid(z)":
        return call(torch.nn.functional.logsigmoid, z)
    if form.name == "-exp(z)":
        return call(torch.neg, call(torch.exp, z))
    if form.name == "-softplus(z)":
        return call(torch.neg, call(torch.nn.functional.softplus, z))
    if form.name == "z * log(2)":
        return call(torch.mul, z, 0.6931471805599453)
    if form.name in ("log(a)", "log(1 - z)"):
        z = z if form.name == "log(a)" else call(aten.rsub.Scalar, z, 1)
        where = str(user_location(z))  # one line: Inductor writes it into the code that it generates
        return call(torch.ops.zeco.log_decay.default, z, where, group)
    raise AssertionError(f"no graph for the gate form {form.name}")


def _emit_write_factor(ops: GraphOperations, name: str, log_decay: fx.Node) -> fx.Node:
    """`roles.WRITE_FACTORS[name]` in the user's graph."""
    call = ops.call
    if name == "1 - a":
        return call(torch.neg, call(torch.expm1, log_decay))
    if name == "sqrt(1 - a^2)":
        return call(torch.sqrt, call(torch.neg, call(torch.expm1, call(torch.mul, log_decay, 2))))
    raise AssertionError(f"no graph for the write factor {name}")


def _state_readers(
    analysis: Analysis, match: Match, order: dict[fx.Node, int]
) -> list[tuple[fx.Node, fx.Node]]:
    """Who reads the state after the last step, other than the region itself."""
    if match.region.final_state is None:
        return []
    inside = set(match.region.user_nodes)
    return [
        (user, argument)
        for (user, argument), read in analysis.shadow.reads.items()
        if isinstance(read, fx.Node)
        and same_value(read) is match.region.final_state
        and user not in inside
        and user in order
    ]


def _place(readers: list[tuple[fx.Node, fx.Node]], order: dict[fx.Node, int], end: fx.Node) -> fx.Node:
    """The node of the user's graph behind which the operator goes: the region's end, or in front of the first node
    that reads the state, if that is earlier and runs in the same mode."""
    first = min((user for user, _ in readers), key=order.__getitem__, default=end)
    if order[first] > order[end] or first is end:
        return end
    mode_of = modes(end.graph)
    return first.prev if mode_of[first.prev] == mode_of[first] == mode_of[end] else end


def _end(analysis: Analysis, region: Region) -> fx.Node:
    """The user's node behind which the region's output is there: the one that computed it, or the one before the node
    that reads it, where it is a view that was written to and is made again when it is read."""
    node = analysis.shadow.origin[region.output]
    read_by_itself = any(
        user is node and read is region.output for (user, _), read in analysis.shadow.reads.items()
    )
    return node.prev if read_by_itself else node


def left_behind(analysis: Analysis, match: Match) -> tuple[fx.Node, str] | None:
    """Once a region has been rewritten: a node of it that others still read, and that is no value of positions by
    itself, and what to say about it."""
    inside = set(match.region.user_nodes)
    for node in analysis.gm.graph.nodes:
        made = analysis.shadow.tensors_made(node) if node in inside else []
        others = [user for user in node.users if user not in inside]
        reader = next((n for n in others if n.op == "output" or analysis.shadow.groups.get(n)), None)
        if reader is None or not any(analysis.state(each) is State.MIXED for each in made):
            continue
        by = (
            "the model returns it"
            if reader.op == "output"
            else f"{expression(reader, op_name(reader))} reads it"
        )
        return node, (
            f"it lies inside of what was, which ends with {expression(_end(analysis, match.region), 'it')}, but "
            f"{by}, and it was not found to be the state of the recurrence after the last token"
        )
    return None


def _erase(analysis: Analysis, region: Region) -> None:
    """Drops the nodes of the region that nobody reads any more, writes into its own buffers included."""
    graph = analysis.gm.graph
    inside = set(region.user_nodes)
    for node in reversed(list(graph.nodes)):
        if node in inside and node.op in ("call_function", "call_method") and not node.users:
            graph.erase_node(node)


def _report(analysis: Analysis, match: Match, number: int, gate: _Gate) -> RegionReport:
    roles, region = match.roles, match.region
    if isinstance(roles, ComplexRoles):
        return _complex_report(analysis, match, roles, number)
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
    end = _end(analysis, region)
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


def _complex_report(analysis: Analysis, match: Match, roles: ComplexRoles, number: int) -> RegionReport:
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
        location=user_location(_end(analysis, region)),
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
    dtype = _promoted([*roles.q, *roles.k, *roles.v], region.output.meta["val"].dtype)
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
