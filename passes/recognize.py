"""Finds gated linear attention in the user's graph, by meaning.

Contract: a region is rewritten only if its output equals the recurrence of DESIGN's kind in float64 on random
values, at every size tried, and the operator that is wired gets exactly the values that were checked. Whatever
does not pass stays as it is; `verify` refuses it later if nothing else makes it right.

    for each user node whose result is MIXED, in order:
        cut the region that ends there
        find roles (roles.py); check each hypothesis against the recurrence at several sizes
        the first that passes: its output is LOCAL from here on

What is found gets one operator in its place: replacement.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State, assign_states
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.complex_recurrences import (
    ComplexRoles,
    find_complex_roles,
    is_complex,
)
from zeco_compile.passes.length import depends_on
from zeco_compile.passes.linearity import first_not_affine
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import reason_against, without_gradient
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
    tolerance,
    with_common_sources,
    with_taken_buffers,
)
from zeco_compile.passes.roles import (
    NotLinearAttention,
    Roles,
    Trials,
    check,
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
        weight = 1.0 if abs(weight - 1.0) <= allowed else rounded(weight)
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
    scale = rounded(scales[0])
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


def rounded(scale: float) -> float:
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
