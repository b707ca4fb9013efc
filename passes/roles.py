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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axes import Atom
from zeco_compile.passes.layout import (
    Canonical,
    CanonicalAxes,
    canonical_value,
    from_canonical_state,
    from_canonical_value,
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


BEFORE = ("kept", "decayed")
"""In which state a position may find what was written before it: see `Roles`."""


@dataclass(frozen=True)
class Roles:
    """A hypothesis about a region. Inputs are ATen nodes; k and v are products of the inputs named.

    `write_factor` names the function of the gate that k is multiplied with. `constant` are the log decays of a
    region that has no gate but forgets, one for each head. `before` says that a position reads the state before its
    own write (a strict mask): "decayed" by its own gate already, or "kept" as the position before has left it. What
    each position reads is multiplied by `rows`. With a `second_gate` the decay is the product of both.
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
    gates = [n for n in region.inputs if n not in affine]
    # What does not matter (the decay of a state of zeros) is random in the checks, too.
    whole = [n for n in region.inputs if n in affine and not along[n] and moved[n] != "none"]
    backwards = [n for n in region.inputs if moved[n] == "earlier"]
    if backwards:
        raise NotLinearAttention(f"positions depend on later ones through {analysis.described(backwards[0])}")
    if any(moved[n] == "own" for n in gates):
        raise NotLinearAttention(
            f"the output is no linear function of {analysis.described(gates[0])}, at its own position"
        )
    gates.sort(key=lambda n: -len(_atoms(analysis, n)))
    if len(gates) > 2 or (
        len(gates) == 2 and not set(_atoms(analysis, gates[1])) <= set(_atoms(analysis, gates[0]))
    ):
        raise NotLinearAttention(
            f"several inputs enter nonlinearly: {', '.join(map(analysis.described, gates))}"
        )
    if not writers:
        raise NotLinearAttention("nothing is carried from one position to later ones linearly")

    rows = row_dims(analysis, region.output)
    reads_before = bool(rows and (as_rows(base, rows)[0] == 0).all())
    output_atoms = _atoms(analysis, region.output)
    outer = {a for n in (*gates, *readers) for a in _atoms(analysis, n)}
    value_atoms = [a for a in output_atoms if a not in outer]
    carries = bool(region.carries) or piecewise(region, analysis)
    states = [n for n in whole if _is_state(analysis, n, value_atoms, () if carries else output_atoms)]
    for candidate_states in ([states[0]] if len(states) == 1 else [], []):
        factors = [n for n in whole if n not in candidate_states]
        # A factor that is the same at every position may stand on either side; it goes with q.
        q = tuple(readers + [n for n in factors if not set(value_atoms) & set(_atoms(analysis, n))])
        v = tuple(
            [n for n in writers if set(value_atoms) & set(_atoms(analysis, n))]
            + [n for n in factors if set(value_atoms) & set(_atoms(analysis, n))]
        )
        k = tuple(n for n in writers if n not in v)
        axes = CanonicalAxes.find(analysis, region.output, q, k, v, gates[0] if gates else None, value_atoms)
        if axes is None:
            continue
        state = candidate_states[0] if candidate_states else None
        if state is not None and not axes.covers(Canonical.STATE, state):
            continue
        if len(gates) == 2:
            for form, second in _PAIRS_OF_FORMS:
                if not reads_before:
                    yield Roles(
                        q, k, v, gates[0], form, state, axes, second_gate=gates[1], second_form=second
                    )
            continue
        if reads_before:
            forms = [(gates[0], form) for form in GATE_FORMS] if gates else [(None, None)]
            ways = BEFORE if gates else BEFORE[:1]
            for (gate, form), factor, way in itertools.product(forms, (None, *WRITE_FACTORS), ways):
                if state is None and (gate is not None or factor is None):
                    yield Roles(q, k, v, gate, form, None, axes, write_factor=factor, before=way)
            continue
        if not gates:
            yield Roles(q, k, v, None, None, state, axes)
            constant = _constant_decay(probe, values, writers, axes)
            if constant is not None:
                yield Roles(q, k, v, None, None, state, axes, constant=constant)
            by_rows = _decay_by_rows(probe, values, writers, axes)
            if by_rows is not None:
                yield Roles(q, k, v, None, None, state, axes, constant=by_rows)
        for form, factor in itertools.product(GATE_FORMS if gates else (), (None, *WRITE_FACTORS)):
            yield Roles(q, k, v, gates[0], form, state, axes, write_factor=factor)


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
    probe: Probe, values: dict[fx.Node, torch.Tensor], writers: Sequence[fx.Node], axes: CanonicalAxes
) -> tuple[float, ...] | None:
    """The log decay of each head in a region without a gate, from what is left at later positions of what was written
    at the first. None if it is not one positive number for each head."""
    o = _left_of_write(probe, values, writers, axes, 0)
    if o is None:
        return None
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
        self, roles: Roles, sizes: Sizes, seed: int, *, extreme: bool = False
    ) -> tuple[dict[fx.Node, torch.Tensor], torch.Tensor]:
        """Values of the inputs, and the region's output for them."""
        gates = tuple((node, form.name) for node, form in roles.gates)
        key = (sizes.length, frozenset(sizes.other.items()), seed, gates, extreme)
        if key not in self._made:
            probe = Probe(self.region, self.analysis, sizes, seed)
            values = _drawn(probe, roles, extreme=extreme)
            self._made[key] = values, probe.run(values)
        return self._made[key]


def check(
    trials: Trials, roles: Roles, sizes: Sizes, seed: int, *, extreme: bool = False
) -> tuple[float, float]:
    """(scale, relative difference) of the region against the recurrence on random values.

    The scale is what the region's output is of the recurrence's; the difference is what remains after it.
    With `extreme` the values are large and the decay is strong, to get beyond limits that ordinary values do not
    touch: scores or states that are clipped, exponents that are clamped, small decays that are dropped.
    """
    sizes = _with_own_heads(roles, sizes)
    values, found = trials.at(roles, sizes, seed, extreme=extreme)
    expected = recurrence_of(roles, values, sizes)
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


def _drawn(probe: Probe, roles: Roles, *, extreme: bool = False) -> dict[fx.Node, torch.Tensor]:
    """Random values of the region's inputs, of the gate such as its form allows."""
    size = _LARGE if extreme else 1.0
    values = {node: probe.normal(node) * size for node in probe.region.inputs}
    for gate, form in roles.gates:
        low, high = sorted((form.weakest, form.strongest)) if extreme else (form.low, form.high)
        values[gate] = probe.random(gate, low, high)
    return values


def final_state_scale(region: Region, analysis: Analysis, roles: Roles) -> float | None:
    """What the region's final state is of the recurrence's, a constant; None if it is not that state."""
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


def row_factor(trials: Trials, roles: Roles, sizes: Sizes, seed: int) -> RowFactor | None:
    """By what the rows of the region's output differ from those of the recurrence, if by nothing else."""
    region, analysis = trials.region, trials.analysis
    if piecewise(region, analysis) or roles.initial_state is not None or roles.before is not None:
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
    axes = roles.axes
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
    return o, state_after


def _one_later(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] with each row at the next position, zeros at the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


# ------------------------------------------------------------------------------------------------------ probing


def _finite_point(probe: Probe) -> tuple[torch.Tensor, dict[fx.Node, torch.Tensor]]:
    """Values at which the region is finite: gates may want positive numbers, or negative ones."""
    inputs = probe.region.inputs
    for low, high in ((0.3, 0.9), (-0.9, -0.3)):
        values = {node: probe.random(node, low, high) for node in inputs}
        base = probe.run(values)
        if bool(torch.isfinite(base).all()):
            return base, values
    for signs in itertools.product((1, -1), repeat=min(len(inputs), 5)):
        values = {
            n: probe.random(n, 0.3, 0.9) * s
            for n, s in zip(inputs, (*signs, *([1] * len(inputs))), strict=False)
        }
        base = probe.run(values)
        if bool(torch.isfinite(base).all()):
            return base, values
    raise NotLinearAttention("it is not finite on ordinary values")


def _is_affine(probe: Probe, values: dict[fx.Node, torch.Tensor], base: torch.Tensor, node: fx.Node) -> bool:
    """Second differences vanish, in two directions of different length."""
    for length in (0.11, 0.29):
        step = probe.random(node, -length, length)
        up = probe.run({**values, node: values[node] + step})
        down = probe.run({**values, node: values[node] - step})
        bend = (up + down - 2 * base).abs().max()
        size = torch.stack([up.abs().max(), down.abs().max(), base.abs().max()]).max()
        if not bool(bend <= TOLERANCE * size):
            return False
    return True


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
    rows = difference.movedim(out_dim, 0).reshape(length, -1).amax(1)
    changed = {i for i in range(length) if bool(rows[i] > TOLERANCE * base.abs().max())}
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
