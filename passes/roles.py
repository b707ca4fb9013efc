"""From a region to q, k, v and g: who plays which role follows from how the output depends on each input.

Nothing here looks at how the user spelled it. Each input is probed in float64: is the output affine in it? Which
positions of the output move when one position of the input does? Which axes does it share with the output? Then

- affine, moving only its own position: part of q;
- affine, moving later positions too: part of v if it has an axis of the output that nothing but v has, else of k;
- not affine, moving later positions: the gate, as the log decay itself, as the decay, or as another function of it.

What comes out is a hypothesis (`Roles`). It counts only after `recognize` has compared the region with the
recurrence on random values at several sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.layout import (
    Canonical,
    CanonicalAxes,
    Operations,
    TensorOperations,
    arrange,
    canonical_value,
    from_canonical_state,
    from_canonical_value,
    value_axes,
)
from zeco_compile.passes.region import (
    TOLERANCE,
    CannotEvaluate,
    Region,
    Sizes,
    as_rows,
    evaluate,
    final_state_value,
    from_rows,
    piecewise,
    row_dims,
    tolerance,
)
from zeco_compile.passes.row_factors import RowFactor, fit

_LARGE = 1e5
"""The size of q, k and v in the checks with extreme values."""


@dataclass(frozen=True)
class GateForm:
    """How an input becomes the log decay: `log_decay(z)`, for z between `low` and `high` in most checks, and from
    `weakest` to `strongest` decay in checks with extreme values.

    `name` is for people, `emit` the name of the same computation in `rewrite`.
    """

    name: str
    log_decay: Callable[[torch.Tensor], torch.Tensor]
    low: float
    high: float
    weakest: float
    strongest: float


GATE_FORMS = (
    GateForm("g", lambda z: z, -0.9, -0.05, -1e-3, -6.0),
    GateForm("log(a)", torch.log, 0.3, 0.97, 0.999, 0.002),
    GateForm("-g", lambda z: -z, 0.05, 0.9, 1e-3, 6.0),
    GateForm("logsigmoid(z)", torch.nn.functional.logsigmoid, -1.0, 1.5, 6.0, -6.0),
    GateForm("-exp(z)", lambda z: -torch.exp(z), -1.5, 0.3, -6.0, 1.8),
    GateForm("-softplus(z)", lambda z: -torch.nn.functional.softplus(z), -1.5, 0.5, -6.0, 6.0),
    GateForm("log(1 - z)", lambda z: torch.log1p(-z), 0.05, 0.7, 1e-3, 0.998),
    GateForm("z * log(2)", lambda z: z * 0.6931471805599453, -0.9, -0.05, -1e-3, -8.0),
)


_PAIRS_OF_FORMS = (
    *((form, form) for form in GATE_FORMS),
    *itertools.permutations([form for form in GATE_FORMS if form.name in ("g", "log(a)")]),
)
"""Of two gates in one step: mostly both are decays, or logarithms of such."""


WRITE_FACTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "1 - a": lambda log_decay: -torch.expm1(log_decay),
    "sqrt(1 - a^2)": lambda log_decay: torch.sqrt(-torch.expm1(2 * log_decay)),
}
"""What a gate may multiply the write with besides the state, as a function of its log decay: what is forgotten
(HGRN, minGRU, a moving average), or what keeps the state's variance (RG-LRU)."""


@dataclass(frozen=True)
class Entrance:
    """A function of an input, in whose value the region is linear: an input gate in an exponent, a normaliser that is
    divided by. It is drawn between `low` and `high`, with any sign if `signed`; the far ranges are tried as well."""

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    inverse: Callable[[torch.Tensor], torch.Tensor]
    low: float
    high: float
    far: tuple[tuple[float, float], tuple[float, float]]
    signed: bool = False


ENTRANCES = (
    Entrance("exp(z)", torch.exp, torch.log, -1.0, 1.0, ((150.0, 200.0), (-200.0, -150.0))),
    Entrance("1 / z", torch.reciprocal, torch.reciprocal, 0.4, 2.0, ((1e4, 1e5), (1e-9, 1e-8)), signed=True),
)


BEFORE = ("kept", "decayed")
"""In which state a position may find what was written before it: see `Roles`."""


@dataclass(frozen=True)
class OwnTerm:
    """What a position takes from its own token beside what it reads of the state: `weight` times the product of
    `inputs`, summed over the axes of keys. The bonus of RWKV, `(q . (u * k)) v`, a diagonal that no gate is applied to,
    or a skip connection."""

    inputs: tuple[fx.Node, ...]
    beside: tuple[fx.Node, ...] = ()
    """Those of the inputs that the state has nothing of."""
    weight: float | None = None
    """Of the recurrence's scale; None before it has been measured."""

    def arranged(
        self, ops: Operations, axes: CanonicalAxes, values: Mapping[fx.Node, Any]
    ) -> tuple[Any | None, Any]:
        """The factors with an axis of keys, [B, T, H, K], if there are any, and the others, [B, T, H, V]."""
        key = [n for n in self.inputs if set(_atoms(axes.analysis, n)) & set(axes.key)]
        others = [n for n in self.inputs if n not in key]
        of_keys = arrange(ops, axes, Canonical.KEY, key, values) if key else None
        return of_keys, arrange(ops, axes, Canonical.VALUE, others, values)

    def fits(self, axes: CanonicalAxes) -> bool:
        """Each of its inputs is a key or a value."""
        return all(axes.covers(Canonical.KEY, n) or axes.covers(Canonical.VALUE, n) for n in self.inputs)


@dataclass(frozen=True)
class Roles:
    """A hypothesis about a region. Inputs are ATen nodes; k and v are products of the inputs named.

    `write_factor` names the function of the gate that k is multiplied with. `constant` are the log decays of a
    region that has no gate but forgets, one for each head. `before` says that a position reads the state before its
    own write (a strict mask): "decayed" by its own gate already, or "kept" as the position before has left it. What
    each position reads is multiplied by `rows`. With a `second_gate` the decay is the product of both. `own` is added
    to what is read. Of the inputs in `entering` q, k or v have a function.
    """

    q: tuple[fx.Node, ...]
    k: tuple[fx.Node, ...]
    v: tuple[fx.Node, ...]
    gate: fx.Node | None
    form: GateForm | None
    initial_state: fx.Node | None
    axes: CanonicalAxes
    scale: float = 1.0
    write_factor: str | None = None
    constant: tuple[float, ...] | None = None
    before: str | None = None
    rows: RowFactor | None = None
    second_gate: fx.Node | None = None
    second_form: GateForm | None = None
    own: OwnTerm | None = None
    entering: tuple[tuple[fx.Node, Entrance], ...] = ()

    def entered(self, values: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
        """The values with the functions of those that are in `entering`."""
        functions = {node: entrance.of for node, entrance in self.entering}
        return {node: functions[node](x) if node in functions else x for node, x in values.items()}

    @property
    def gates(self) -> tuple[tuple[fx.Node, GateForm], ...]:
        both = ((self.gate, self.form), (self.second_gate, self.second_form))
        return tuple((node, form) for node, form in both if node is not None and form is not None)

    @property
    def is_running_sum(self) -> bool:
        """Nothing but a sum over the positions so far. Of one number per position (one sequence, no heads) it cannot be
        told whether it is the value or the key."""
        nothing_else = not self.q and not (self.k and self.v) and self.initial_state is None
        return self.gate is None and self.constant is None and nothing_else

    @property
    def family(self) -> str:
        if self.constant is not None:
            return "constant per head"
        if self.gate is None:
            return "none"
        return self.axes.gate_family


class NotLinearAttention(Exception):
    """Why a region has no such roles."""


class Probe:
    """Runs a region on random values, and reports how its output depends on them."""

    def __init__(self, region: Region, analysis: Analysis, sizes: Sizes, seed: int) -> None:
        self.region, self.analysis, self.sizes = region, analysis, sizes
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, node: fx.Node, low: float, high: float) -> torch.Tensor:
        unit = torch.rand(self.sizes.shape(node), generator=self.generator, dtype=torch.float64)
        return unit * (high - low) + low

    def normal(self, node: fx.Node) -> torch.Tensor:
        return torch.randn(self.sizes.shape(node), generator=self.generator, dtype=torch.float64)

    def run(self, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        return evaluate(self.region, values, self.sizes)


_Run = Callable[[dict[fx.Node, torch.Tensor]], torch.Tensor]
"""What is computed from values of a region's inputs."""


def find_roles(region: Region, analysis: Analysis, sizes: Sizes) -> Iterator[Roles]:
    """Hypotheses about the region, to be checked. Raises NotLinearAttention if there can be none."""
    for node in region.inputs:
        if not node.meta["val"].dtype.is_floating_point:
            raise NotLinearAttention(f"it depends on {analysis.described(node)}, which holds no real numbers")
    probe = Probe(region, analysis, sizes, seed=1)
    base, values = _finite_point(probe)
    affine = {node for node in region.inputs if _is_affine(probe, values, base, node)}
    moved = {node: _moves(probe, values, base, node) for node in region.inputs}
    track = analysis.track
    along = {node: bool(track.sequence_dims(node)) for node in region.inputs}
    _refuse_the_unseen([analysis.described(n) for n, how in moved.items() if how == "none" and along[n]])

    readers = [n for n in region.inputs if n in affine and along[n] and moved[n] == "own"]
    writers = [n for n in region.inputs if n in affine and along[n] and moved[n] == "later"]
    entering = _find_entering(probe, values, base, moved, writers) if len(affine) < len(region.inputs) else {}
    readers += [n for n in entering if moved[n] == "own"]
    gates = [n for n in region.inputs if n not in affine and n not in entering]
    # What does not matter (the decay of a state of zeros) is random in the checks, too.
    whole = [n for n in region.inputs if n in affine and not along[n] and moved[n] != "none"]
    backwards = [n for n in region.inputs if moved[n] == "earlier"]
    if backwards:
        raise NotLinearAttention(f"positions depend on later ones through {analysis.described(backwards[0])}")
    if any(moved[n] == "own" for n in gates):
        of = analysis.described(gates[0])
        reason = f"the output is no linear function of {of}, at its own position"
        if _is_quadratic(probe, values, base, gates[0]):
            reason += (
                "; it is one of second degree: where scores are squared, the attention is linear in features of it, "
                "its products with itself, and is found if the model computes these features of q and k"
            )
        raise NotLinearAttention(reason)
    gates.sort(key=lambda n: -len(_atoms(analysis, n)))
    if len(gates) > 2 or (
        len(gates) == 2 and not set(_atoms(analysis, gates[1])) <= set(_atoms(analysis, gates[0]))
    ):
        raise NotLinearAttention(
            f"several inputs enter nonlinearly: {', '.join(map(analysis.described, gates))}"
        )
    if not writers:
        raise NotLinearAttention("nothing is carried from one position to later ones linearly")

    in_rows = bool(row_dims(analysis, region.output))
    own: OwnTerm | None = None
    rest_of: _Run = probe.run
    if in_rows:
        own, rest_of = _find_own_term(probe, values, base, readers, writers, whole)
    beside = own.beside if own is not None else ()
    readers, whole = ([n for n in nodes if n not in beside] for nodes in (readers, whole))
    written = [n for n in region.inputs if n in writers or (n in entering and moved[n] == "later")]
    reads_before = in_rows and not _moves_row(probe, rest_of, values, writers, 0, 0.0)
    reads_kept = in_rows and bool(gates) and _reads_undecayed(probe, values, writers, gates[0])
    output_atoms = _atoms(analysis, region.output)
    value_atoms = value_axes(analysis, output_atoms, (*gates, *readers), writers)
    carries = bool(region.carries) or piecewise(region, analysis)
    states = [n for n in whole if _is_state(analysis, n, value_atoms, () if carries else output_atoms)]
    for candidate_states in ([states[0]] if len(states) == 1 else [], []):
        factors = [n for n in whole if n not in candidate_states]
        # A factor that is the same at every position may stand on either side; it goes with q.
        q = tuple(readers + [n for n in factors if not set(value_atoms) & set(_atoms(analysis, n))])
        v = tuple(
            [n for n in written if set(value_atoms) & set(_atoms(analysis, n))]
            + [n for n in factors if set(value_atoms) & set(_atoms(analysis, n))]
        )
        k = tuple(n for n in written if n not in v)
        axes = CanonicalAxes.find(analysis, region.output, q, k, v, gates[0] if gates else None, value_atoms)
        if axes is None or (own is not None and not own.fits(axes)):
            continue
        state = candidate_states[0] if candidate_states else None
        if state is not None and not axes.covers(Canonical.STATE, state):
            continue
        roles = Roles(q, k, v, None, None, state, axes, own=own, entering=tuple(entering.items()))
        if len(gates) == 2:
            for form, second in _PAIRS_OF_FORMS:
                if not reads_before:
                    yield replace(roles, gate=gates[0], form=form, second_gate=gates[1], second_form=second)
            continue
        own_write = replace(roles, before="kept", own=OwnTerm((*q, *k, *v)))
        if gates:
            ways = [replace(roles, before=way) for way in BEFORE] if reads_before else [roles]
            if reads_kept and not reads_before and own is None:
                ways = [own_write]
            for form, factor, way in itertools.product(GATE_FORMS, (None, *WRITE_FACTORS), ways):
                if factor is None or way.own is None:
                    yield replace(way, gate=gates[0], form=form, write_factor=factor)
            continue
        alone = {n: torch.zeros_like(v) if n in beside else v for n, v in values.items()}
        later = _constant_decay(probe, alone, writers, axes, after=1)
        if reads_before:
            yield replace(roles, before="kept")
            for each in BEFORE if later is not None else ():
                yield replace(roles, before=each, constant=later)
            continue
        yield roles
        constant = _constant_decay(probe, alone, writers, axes) if own is None else later
        if constant is not None:
            yield replace(roles, constant=constant)
        by_rows = _decay_by_rows(probe, values, writers, axes)
        if by_rows is not None:
            yield replace(roles, constant=by_rows)
        if own is None:
            yield replace(own_write, constant=later)


def _find_entering(
    probe: Probe,
    values: dict[fx.Node, torch.Tensor],
    base: torch.Tensor,
    moved: Mapping[fx.Node, str],
    writers: Sequence[fx.Node],
) -> dict[fx.Node, Entrance]:
    """The inputs of which the region is linear in a function, as far as that is one of `ENTRANCES`. Those that later
    positions see of are seen through what their own position writes, and not otherwise, as a gate is."""
    found: dict[fx.Node, Entrance] = {}
    if not row_dims(probe.analysis, probe.region.output):
        return found
    for node, how in moved.items():
        if how not in ("own", "later") or not probe.analysis.track.sequence_dims(node):
            continue
        if _is_affine(probe, values, base, node):
            continue
        if how == "later":
            unwritten = _with_row(probe, values, writers, 1, 0.0)
            difference = probe.run(_with_row(probe, unwritten, [node], 1, 0.83)) - probe.run(unwritten)
            if not writers or not bool((difference.abs() <= TOLERANCE * base.abs().max()).all()):
                continue
        for entrance in ENTRANCES:
            u = entrance.of(values[node])

            def through(
                values: dict[fx.Node, torch.Tensor], node: fx.Node = node, by: Entrance = entrance
            ) -> Any:
                return probe.run({**values, node: by.inverse(values[node])})

            if _is_affine(probe, {**values, node: u}, base, node, through):
                found[node] = entrance
                break
    return found


def _find_own_term(
    probe: Probe,
    values: dict[fx.Node, torch.Tensor],
    base: torch.Tensor,
    readers: Sequence[fx.Node],
    writers: Sequence[fx.Node],
    whole: Sequence[fx.Node],
) -> tuple[OwnTerm | None, _Run]:
    """The term of the output that a position computes from its own token, if something has no part in the state or
    nothing of it, and what computes the others.

    An input that all of the output is linear in makes all of it vanish. With another there are two terms, one with it
    and one without.
    """
    allowed = TOLERANCE * float(base.abs().max())

    def vanishes(x: torch.Tensor) -> bool:
        return bool((x.abs() <= allowed).all())

    def without(values: dict[fx.Node, torch.Tensor], node: fx.Node) -> dict[fx.Node, torch.Tensor]:
        return {**values, node: torch.zeros_like(values[node])}

    changed = {n: v if n in (*readers, *writers, *whole) else v * 0.9 for n, v in values.items()}
    elsewhere = _with_row(probe, changed, writers, 1, 0.0)
    for node in (*readers, *whole):
        if vanishes(probe.run(without(values, node))):
            continue

        def other(values: dict[fx.Node, torch.Tensor], node: fx.Node = node) -> torch.Tensor:
            return probe.run(without(values, node))

        def its(values: dict[fx.Node, torch.Tensor], node: fx.Node = node) -> torch.Tensor:
            return probe.run(values) - probe.run(without(values, node))

        for term, rest in ((its, other), (other, its)):
            difference = _rows_of(probe, term(elsewhere) - term(values))
            if not vanishes(torch.cat([difference[:1], difference[2:]])):
                continue  # what is written at one position is read at others, or decays
            inputs = tuple(n for n in (*readers, *whole, *writers) if vanishes(term(without(values, n))))
            beside = tuple(n for n in inputs if not vanishes(rest(without(values, n))))
            if any(n in writers or (n in readers and n in beside) for n in inputs):
                return OwnTerm(inputs, beside), rest
    return None, probe.run


def _rows_of(probe: Probe, output: torch.Tensor) -> torch.Tensor:
    """[T, ...] of the region's output."""
    rows = row_dims(probe.analysis, probe.region.output)
    assert rows, "it has been asked for"
    return as_rows(output, rows)


def _with_row(
    probe: Probe, values: dict[fx.Node, torch.Tensor], nodes: Sequence[fx.Node], row: int, factor: float
) -> dict[fx.Node, torch.Tensor]:
    """The values with one row of these inputs multiplied by a number; the whole input where it has no rows."""
    out = dict(values)
    for node in nodes:
        along = row_dims(probe.analysis, node)
        if not along:
            out[node] = values[node] * factor
            continue
        rows = as_rows(values[node], along).clone()
        rows[row] *= factor
        out[node] = from_rows(rows, along, values[node].shape)
    return out


def _moves_row(
    probe: Probe,
    run: _Run,
    values: dict[fx.Node, torch.Tensor],
    nodes: Sequence[fx.Node],
    row: int,
    factor: float,
) -> bool:
    """A row of what `run` computes moves when that of these inputs does."""
    before, after = run(values), run(_with_row(probe, values, nodes, row, factor))
    difference = _rows_of(probe, after - before)[row].abs()
    size = _rows_of(probe, before)[row].abs().max().clamp(min=_SMALL_ROW * float(before.abs().max()))
    return not bool((difference <= TOLERANCE * size).all())


_SMALL_ROW = 1e-4
"""A row that is smaller than so much of the largest may be the rounding of what is zero."""


def _reads_undecayed(
    probe: Probe, values: dict[fx.Node, torch.Tensor], writers: Sequence[fx.Node], gate: fx.Node
) -> bool:
    """A position's gate does not act on what it reads from those before it."""
    return not _moves_row(probe, probe.run, _with_row(probe, values, writers, 1, 0.0), [gate], 1, 0.83)


def _left_of_write(
    probe: Probe,
    values: dict[fx.Node, torch.Tensor],
    writers: Sequence[fx.Node],
    axes: CanonicalAxes,
    at: int,
) -> torch.Tensor | None:
    """What all positions read, [B, T, H, V], of what is written at one of them, the same wherever that is."""
    if any(atom in probe.sizes.other for atom in axes.heads):
        return None  # at other sizes the heads are not those of the model
    impulse = dict(values)
    for node in writers:
        along = row_dims(probe.analysis, node)
        assert along, "a writer has rows"
        first = as_rows(values[node], along)[:1]
        alone = torch.zeros_like(as_rows(values[node], along))
        alone[at] = first[0]
        impulse[node] = from_rows(alone, along, values[node].shape)
    # The readers are alike at all positions, so that only the decay makes a difference.
    for node in probe.region.inputs:
        along = row_dims(probe.analysis, node)
        if node not in writers and along:
            alike = as_rows(values[node], along)[:1].expand_as(as_rows(values[node], along))
            impulse[node] = from_rows(alike.contiguous(), along, values[node].shape)
    output = probe.region.output
    return canonical_value(axes, Canonical.VALUE, [output], {output: probe.run(impulse)}, probe.sizes)


def _decay_by_rows(
    probe: Probe, values: dict[fx.Node, torch.Tensor], writers: Sequence[fx.Node], axes: CanonicalAxes
) -> tuple[float, ...] | None:
    """The log decay of each head where what a position reads is multiplied by a factor of its own: from two writes that
    the same position reads."""
    if piecewise(probe.region, probe.analysis):
        return None
    first, second = (_left_of_write(probe, values, writers, axes, at) for at in (0, 1))
    if first is None or second is None:
        return None
    ratio = (first / second)[:, 1:]
    head = ratio[:1, :1, :, :1]
    same = bool(((ratio - head).abs() <= tolerance(probe.region) * head.abs()).all())
    if not same or not bool((head > 0).all()) or not bool((head < 1).all()):
        return None
    return tuple(head.log().flatten().tolist())


def _constant_decay(
    probe: Probe,
    values: dict[fx.Node, torch.Tensor],
    writers: Sequence[fx.Node],
    axes: CanonicalAxes,
    *,
    after: int = 0,
) -> tuple[float, ...] | None:
    """The log decay of each head in a region without a gate, from what is left at later positions of what was written
    at the first, from the one that is so many `after` it on. None if it is not one positive number for each head."""
    o = _left_of_write(probe, values, writers, axes, 0)
    if o is None or o.shape[1] < after + 2:
        return None
    o = o[:, after:]
    allowed = tolerance(probe.region)
    ratio = o[:, 1] / o[:, 0]
    head = ratio[:1, :, :1]
    same = bool(torch.isfinite(ratio).all()) and bool(((ratio - head).abs() <= allowed * head.abs()).all())
    nothing_forgotten = bool(((head - 1).abs() <= TOLERANCE).all())
    if not same or nothing_forgotten or not bool((head > 0).all()):
        return None
    # Over many positions a rounding of what is left matters least; but something has to be left.
    left = o[0, :, :, 0] / o[0, :1, :, 0]
    last = (left >= _LEFT).sum(0).clamp(min=2) - 1
    return tuple(float(each[at].log() / at) for each, at in zip(left.T, last.tolist(), strict=True))


_LEFT = 1e-3


class Trials:
    """A region on the random values of its checks. What is drawn depends on the forms of the gates and on nothing else
    of a hypothesis, so that hypotheses which share them are compared with one run of the region."""

    def __init__(self, region: Region, analysis: Analysis) -> None:
        self.region, self.analysis = region, analysis
        self._made: dict[tuple[object, ...], tuple[dict[fx.Node, torch.Tensor], torch.Tensor]] = {}

    def at(
        self, roles: Roles, sizes: Sizes, seed: int, *, extreme: int = 0
    ) -> tuple[dict[fx.Node, torch.Tensor], torch.Tensor]:
        """Values of the inputs, and the region's output for them."""
        gates = tuple((node, form.name) for node, form in roles.gates)
        entering = tuple((node, entrance.name) for node, entrance in roles.entering)
        key = (sizes.length, frozenset(sizes.other.items()), seed, gates, entering, extreme)
        if key not in self._made:
            probe = Probe(self.region, self.analysis, sizes, seed)
            values = _drawn(probe, roles, extreme=extreme)
            self._made[key] = values, probe.run(values)
        return self._made[key]


def check(trials: Trials, roles: Roles, sizes: Sizes, seed: int, *, extreme: int = 0) -> tuple[float, float]:
    """(scale, relative difference) of the region against the recurrence on random values.

    The scale is what the region's output is of the recurrence's; the difference is what remains after it.
    With `extreme` the values are large and the decay is strong, to get beyond limits that ordinary values do not
    touch: scores or states that are clipped, exponents that are clamped, small decays that are dropped. Where a
    function of an input enters, with 1 in the one of its far ranges, with 2 in the other.
    """
    sizes = _with_own_heads(roles, sizes)
    values, found = trials.at(roles, sizes, seed, extreme=extreme)
    expected = recurrence_of(roles, values, sizes)
    if roles.own is not None and roles.own.weight is not None:
        expected = expected + roles.own.weight * own_term_of(roles, values, sizes)
    if not (bool(torch.isfinite(found).all()) and bool(torch.isfinite(expected).all())):
        return 0.0, float("inf")
    norm = float((expected * expected).sum())
    if norm == 0.0:
        return 0.0, float("inf")
    scale = float((found * expected).sum()) / norm
    difference = float((found - scale * expected).abs().max()) / max(float(found.abs().max()), 1e-300)
    return scale, difference


_STEPS = 7


def _with_own_heads(roles: Roles, sizes: Sizes) -> Sizes:
    """With a constant for each head, the heads have to be those of the model."""
    if roles.constant is None:
        return sizes
    kept = {atom: size for atom, size in sizes.other.items() if atom not in roles.axes.heads}
    return Sizes(sizes.analysis, sizes.length, kept)


def _drawn(probe: Probe, roles: Roles, *, extreme: int = 0) -> dict[fx.Node, torch.Tensor]:
    """Random values of the region's inputs, of the gate such as its form allows."""
    size = _LARGE if extreme else 1.0
    values = {node: probe.normal(node) * size for node in probe.region.inputs}
    for gate, form in roles.gates:
        low, high = sorted((form.weakest, form.strongest)) if extreme else (form.low, form.high)
        values[gate] = probe.random(gate, low, high)
    for node, entrance in roles.entering:
        low, high = entrance.far[extreme - 1] if extreme else (entrance.low, entrance.high)
        sign = probe.normal(node).sign() if entrance.signed else 1.0
        values[node] = probe.random(node, low, high) * sign
    return values


def final_state_scale(region: Region, analysis: Analysis, roles: Roles) -> float | None:
    """What the region's final state is of the recurrence's behind the last write, a constant; None if it is not that
    state."""
    if region.final_state is None or not (isinstance(analysis.length, int) or region.carries):
        return None
    length = analysis.length if isinstance(analysis.length, int) and not region.carries else _STEPS
    sizes, scales = Sizes(analysis, length), []
    for seed in (21, 22):
        probe = Probe(region, analysis, sizes, seed)
        values = _drawn(probe, roles)
        found = final_state_value(region, values, sizes)
        _, state = _recurrence(roles, values, sizes)
        expected = from_canonical_state(roles.axes, state, region.final_state, sizes)
        if expected is None or expected.shape != found.shape:
            return None
        scale = float((found * expected).sum() / (expected * expected).sum())
        if not float((found - scale * expected).abs().max()) <= tolerance(region) * float(found.abs().max()):
            return None
        scales.append(scale)
    return scales[0] if abs(scales[0] - scales[1]) <= tolerance(region) * abs(scales[0]) else None


def recurrence_of(roles: Roles, values: dict[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The recurrence on these values, in the shape of the region's output."""
    o = _recurrence(roles, values, sizes)[0]
    if roles.rows is not None:
        o = o * roles.rows.values(sizes.length)[:, :, None]
    return from_canonical_value(roles.axes, o, sizes)


def own_term_of(roles: Roles, values: dict[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The own term without its weight, in the shape of the region's output."""
    assert roles.own is not None
    values = roles.entered(values)
    of_keys, others = roles.own.arranged(TensorOperations(sizes), roles.axes, values)
    term = others if of_keys is None else of_keys.sum(-1, keepdim=True) * others
    return from_canonical_value(roles.axes, term, sizes)


def own_weight(trials: Trials, roles: Roles, sizes: Sizes, seed: int) -> float | None:
    """How much of the own term there is for one of the recurrence."""
    sizes = _with_own_heads(roles, sizes)
    values, output = trials.at(roles, sizes, seed)
    terms = [recurrence_of(roles, values, sizes), own_term_of(roles, values, sizes)]
    found = output.flatten()
    if not all(bool(torch.isfinite(x).all()) for x in (found, *terms)):
        return None
    of_recurrence, of_own = (
        torch.linalg.lstsq(torch.stack([term.flatten() for term in terms], 1), found[:, None])
        .solution.flatten()
        .tolist()
    )
    return of_own / of_recurrence if of_recurrence else None


def row_factor(trials: Trials, roles: Roles, sizes: Sizes, seed: int) -> RowFactor | None:
    """By what the rows of the region's output differ from those of the recurrence, if by nothing else."""
    region, analysis = trials.region, trials.analysis
    plain = roles.initial_state is None and roles.before is None and roles.own is None
    if piecewise(region, analysis) or not plain:
        return None
    sizes = _with_own_heads(roles, sizes)
    values, output = trials.at(roles, sizes, seed)
    found = canonical_value(roles.axes, Canonical.VALUE, [region.output], {region.output: output}, sizes)
    expected = _recurrence(roles, values, sizes)[0]
    norms = (expected * expected).sum((0, 3))
    scales = (found * expected).sum((0, 3)) / norms
    left = (found - scales[:, :, None] * expected).abs().max()
    if not bool(left <= tolerance(region) * found.abs().max()):
        return None
    return fit(scales, roles.constant, tolerance(region))


def _recurrence(
    roles: Roles, values: dict[fx.Node, torch.Tensor], sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    axes, values = roles.axes, roles.entered(values)
    g = None
    k = canonical_value(axes, Canonical.KEY, roles.k, values, sizes)
    if roles.constant is not None:
        shape = [sizes.of_dim(axes.batch), sizes.length, sizes.of_dim(axes.heads)]
        g = torch.tensor(roles.constant, dtype=torch.float64).expand(shape)
    if roles.gate is not None and roles.form is not None:
        log_decay = roles.form.log_decay(values[roles.gate])
        g = canonical_value(axes, Canonical.GATE, [roles.gate], {roles.gate: log_decay}, sizes)
        if roles.write_factor is not None:
            factor = WRITE_FACTORS[roles.write_factor](log_decay)
            k = k * canonical_value(axes, Canonical.KEY, [roles.gate], {roles.gate: factor}, sizes)
        for gate, form in roles.gates[1:]:
            g = g + canonical_value(axes, Canonical.GATE, [gate], {gate: form.log_decay(values[gate])}, sizes)
    v = canonical_value(axes, Canonical.VALUE, roles.v, values, sizes)
    written_k, written_v, written_g = k, v, g
    if roles.before is not None:
        k, v = _one_later(k), _one_later(v)
        if g is not None and roles.before == "kept":
            g = _one_later(g)
        elif g is not None:
            k = k * (g if g.dim() == k.dim() else g[..., None]).exp()
    state = None
    if roles.initial_state is not None:
        state = canonical_value(axes, Canonical.STATE, [roles.initial_state], values, sizes)
    o, state_after = recurrent_gated_linear_attention(
        canonical_value(axes, Canonical.KEY, roles.q, values, sizes),
        k,
        v,
        g,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    assert state_after is not None, "it was asked for"
    if roles.before is not None:
        if written_g is not None and roles.before == "kept":
            last = written_g[:, -1]
            state_after = state_after * (last if axes.gate_has_key else last[..., None]).exp()[..., None]
        state_after = state_after + written_k[:, -1, :, :, None] * written_v[:, -1, :, None]
    return o, state_after


def _one_later(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] with each row at the next position, zeros at the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


# ------------------------------------------------------------------------------------------------------ probing


def _finite_point(probe: Probe) -> tuple[torch.Tensor, dict[fx.Node, torch.Tensor]]:
    """Values at which the region is finite: gates may want positive numbers, or negative ones. Of those the first at
    which it is not large here and small there, or the nearest to it: where a state grows by e^0.6 a token, what the
    first of many tokens do is lost in the rounding of the last ones."""
    inputs = probe.region.inputs
    calmest: tuple[float, torch.Tensor, dict[fx.Node, torch.Tensor]] | None = None
    signs = [(1,) * len(inputs), (-1,) * len(inputs)]
    free = min(len(inputs), 5)
    signs += [(*some, *([1] * (len(inputs) - free))) for some in itertools.product((1, -1), repeat=free)]
    for sign in signs:
        values = {
            n: probe.random(n, *((0.3, 0.9) if s > 0 else (-0.9, -0.3)))
            for n, s in zip(inputs, sign, strict=True)
        }
        base = probe.run(values)
        if bool(torch.isfinite(base).all()):
            spread = _spread(base)
            if calmest is None or spread < calmest[0]:
                calmest = spread, base, values
            if spread <= _CALM:
                break
    if calmest is None:
        raise NotLinearAttention("it is not finite on ordinary values")
    return calmest[1:]


_CALM = 100.0


def _spread(x: torch.Tensor) -> float:
    """How far the largest number is above the middle one."""
    sizes = x.abs()[x != 0]
    return float(sizes.max() / sizes.median()) if sizes.numel() else 1.0


def _is_affine(
    probe: Probe,
    values: dict[fx.Node, torch.Tensor],
    base: torch.Tensor,
    node: fx.Node,
    run: _Run | None = None,
) -> bool:
    """Second differences vanish, in two directions of different length."""
    run = run or probe.run
    for length in (0.11, 0.29):
        step = probe.random(node, -length, length)
        up = run({**values, node: values[node] + step})
        down = run({**values, node: values[node] - step})
        bend = (up + down - 2 * base).abs().max()
        size = torch.stack([up.abs().max(), down.abs().max(), base.abs().max()]).max()
        if not bool(bend <= TOLERANCE * size):
            return False
    return True


def _is_quadratic(
    probe: Probe, values: dict[fx.Node, torch.Tensor], base: torch.Tensor, node: fx.Node
) -> bool:
    """Third differences vanish."""
    step = probe.random(node, -0.1, 0.1)
    at = {i: probe.run({**values, node: values[node] + i * step}) for i in (-2, -1, 1, 2)}
    bend = (at[2] - 2 * at[1] + 2 * at[-1] - at[-2]).abs().max()
    return bool(bend <= TOLERANCE * torch.stack([base, *at.values()]).abs().max())


def _moves(probe: Probe, values: dict[fx.Node, torch.Tensor], base: torch.Tensor, node: fx.Node) -> str:
    """Which positions of the output move when one position of `node` does: "own", "later" (and perhaps own),
    "earlier", "none"; for an input without a sequence axis, "all" or "none"."""
    dims = row_dims(probe.analysis, node)
    if dims is None:
        return "earlier"
    changed: set[int] = set()
    if not dims:
        shifted = probe.run({**values, node: values[node] * 0.9})
        return "all" if bool(((shifted - base).abs() > TOLERANCE * base.abs().max()).any()) else "none"
    length = probe.sizes.length
    at = length // 2
    rows = as_rows(values[node], dims).clone()
    rows[at] *= 0.83
    other = from_rows(rows, dims, values[node].shape)
    difference = (probe.run({**values, node: other}) - base).abs()
    (out_dim,) = probe.analysis.track.sequence_dims(probe.region.output)
    rows, sizes = (x.movedim(out_dim, 0).reshape(length, -1).amax(1) for x in (difference, base.abs()))
    sizes = sizes.clamp(min=_SMALL_ROW * float(sizes.max()))
    changed = set((rows > TOLERANCE * sizes).nonzero().flatten().tolist())
    if not changed:
        return "none"
    if min(changed) < at:
        return "earlier"
    return "own" if changed == {at} else "later"


def _refuse_the_unseen(unseen: Sequence[str]) -> None:
    if unseen:
        raise NotLinearAttention(
            f"the output does not depend on its input {', '.join(unseen)} at the sizes probed"
        )


def _atoms(analysis: Analysis, node: fx.Node) -> list[Atom]:
    """The axes of a value other than the sequence, in order."""
    axes = analysis.track.axes
    return [a for dim in analysis.track.dims(node) for a in axes.flat(dim) if not a.sequence]


def _is_state(analysis: Analysis, node: fx.Node, value: Sequence[Atom], output: Sequence[Atom]) -> bool:
    """A whole input with all the values' axes and one that the output lacks (or no axes to tell by)."""
    atoms = _atoms(analysis, node)
    return set(value) <= set(atoms) and any(a not in output for a in atoms)


__all__ = [
    "CannotEvaluate",
    "GateForm",
    "NotLinearAttention",
    "Probe",
    "Roles",
    "Trials",
    "check",
    "find_roles",
]
