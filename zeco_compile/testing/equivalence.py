"""The public face of the harness: sharded and compiled must equal unsharded and eager, or must be refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.passes.errors import InternalError
from zeco_compile.testing.compare import Difference, compare, default_rtol, fault, rms
from zeco_compile.testing.errors import HarnessError, NotEquivalent, NotRefused
from zeco_compile.testing.on_rank import OUTPUT, Answer, Case, compare_on_rank, run_on_rank
from zeco_compile.testing.pool import describe, run_on_ranks
from zeco_compile.testing.worker import Outcome

_SHOWN = 20


@dataclass(frozen=True)
class Equivalence:
    """What a passed comparison found.

    ``worst`` has the largest difference of every kind that there was something of: "output", "input
    gradient", "parameter gradient", "buffer". ``reports[rank]`` is what the backend reported there, as
    plain data (:meth:`zeco_compile.Report.to_dict`). ``output_dims`` says for every output tensor along
    which dimension it came back sliced (None: whole on every rank).
    """

    world_size: int
    worst: dict[str, Difference]
    reports: tuple[dict[str, Any], ...]
    output_dims: tuple[int | None, ...]
    differences: tuple[Difference, ...] = field(repr=False)

    @property
    def regions(self) -> list[dict[str, Any]]:
        """The regions that rank 0 recognised; all ranks decide alike."""
        regions: list[dict[str, Any]] = self.reports[0].get("regions", [])
        return regions

    def decisions(self, decision: str) -> list[dict[str, Any]]:
        """What rank 0 decided so ("halo exchange", "offset", ...) about nodes outside the regions."""
        return [each for each in self.reports[0].get("decisions", []) if each["decision"] == decision]


def assert_equivalent(
    make_model: Callable[[], Callable[..., Any]],
    make_inputs: Callable[[], Any],
    *,
    world_size: int,
    options: dict[str, Any] | None = None,
    seq_dim: int = 1,
    dtype: torch.dtype | None = torch.float64,
    reference_dtype: torch.dtype | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    backward: bool = True,
    seed: int = 0,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    contiguous: bool = True,
    codegen: str = "aot_eager",
    output_dims: Sequence[int | None] | None = None,
    timeout: float = 180.0,
    _backend: Any = "zeco",
) -> Equivalence:
    """A model compiled with ``backend="zeco"``, on ``world_size`` ranks, equals itself unsharded in eager.

    ``make_model()`` builds the unmodified model, an ``nn.Module`` or any function of tensors;
    ``make_inputs()`` returns its FULL inputs: a tensor, a tuple, or ``(args, kwargs)``. Both run on every
    rank under ``seed``; they may be closures, but must not depend on the rank. Every input is cut along
    ``seq_dim``, or as :func:`zeco_compile.mark_sequence` marked it; a tensor that lacks the dimension
    stays whole.

    Compared, on every rank: every output (any pytree; one that came back as a slice with the slice, any
    other with the whole); the gradient of every floating-point input (of inputs that are whole on every
    rank, the SUM over ranks); every parameter's gradient (the SUM over ranks); every buffer as the
    forward left it. The cotangents are random; for outputs that are equal on every rank each rank uses
    its ``1 / world_size`` of them.

    ``dtype`` is what floating-point weights and inputs are cast to (None: left as made),
    ``reference_dtype`` what the unsharded run uses if that is to be another. A tensor passes when both
    its norm-wise error and its worst element, relative to the largest, are within ``rtol`` (default:
    1e-10 in float64, 1e-5 in float32, 2e-2 in bfloat16), or its root-mean-square error is within ``atol``
    (default: rounding at the scale of the largest tensor of its kind). ``output_dims`` states, per output
    tensor in pytree order, the sequence dimension (None: it has none) where the shapes leave that open.
    ``codegen`` and ``seq_dim`` go to the backend's options. ``contiguous=False`` gives each rank a view of a
    tensor as long as the whole sequence, as ``x.chunk(world_size, dim=1)[rank]`` is.

    Raises :class:`NotEquivalent` with every tensor that is off, on which rank, and by how much; what a
    rank raised, when that is a :class:`zeco_compile.ZecoError`, as its own class; else
    :class:`RankFailed`, :class:`RankDied`, or after ``timeout`` seconds :class:`RankTimedOut` with the
    traceback of the rank that did not answer.
    """
    case = Case(
        make_model=make_model,
        make_inputs=make_inputs,
        backend=_backend,
        options=_options(options, seq_dim, codegen, _backend),
        seq_dim=seq_dim,
        dtype=dtype,
        reference_dtype=reference_dtype or dtype,
        rtol=default_rtol(dtype) if rtol is None else rtol,
        atol=atol,
        backward=backward,
        seed=seed,
        fullgraph=fullgraph,
        dynamic=dynamic,
        contiguous=contiguous,
        output_dims=None if output_dims is None else tuple(output_dims),
    )
    answers: list[Answer] = run_on_ranks(compare_on_rank, case, world_size=world_size, timeout=timeout)
    found = [difference for answer in answers for difference in answer.differences]
    found += _compare_sums(answers, case)
    if len({answer.output_dims for answer in answers}) > 1:
        found.append(fault(OUTPUT, "all", "the ranks differ", _dims_by_rank(answers), case.rtol))
    _raise_unless_passed(found, world_size)
    return Equivalence(
        world_size=world_size,
        worst=_worst(found),
        reports=tuple(answer.report for answer in answers),
        output_dims=answers[0].output_dims,
        differences=tuple(found),
    )


def assert_refused(
    make_model: Callable[[], Callable[..., Any]],
    make_inputs: Callable[[], Any],
    *,
    world_size: int,
    match: str | None = None,
    error: type[ZecoError] = ZecoError,
    options: dict[str, Any] | None = None,
    seq_dim: int = 1,
    dtype: torch.dtype | None = torch.float64,
    backward: bool = False,
    seed: int = 0,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    contiguous: bool = True,
    codegen: str = "aot_eager",
    lengths: Sequence[int] | None = None,
    timeout: float = 120.0,
    _backend: Any = "zeco",
) -> list[str]:
    """Every rank refuses this model with a typed error, and none hangs; returns the messages in rank order.

    Arguments as for :func:`assert_equivalent`; the eager model must run on the full inputs. ``match`` is
    a regular expression that every message must contain, ``error`` the class that every rank must raise.
    An internal error of the compiler is no refusal unless ``error`` asks for it. ``lengths`` gives each
    rank that many positions of the inputs instead of an equal share. With ``backward`` an error in the
    backward counts too.

    Raises :class:`NotRefused` when some rank ran through, failed in another way, or did not answer.
    """
    case = Case(
        make_model=make_model,
        make_inputs=make_inputs,
        backend=_backend,
        options=_options(options, seq_dim, codegen, _backend),
        seq_dim=seq_dim,
        dtype=dtype,
        reference_dtype=dtype,
        rtol=default_rtol(dtype),
        atol=None,
        backward=backward,
        seed=seed,
        fullgraph=fullgraph,
        dynamic=dynamic,
        contiguous=contiguous,
        lengths=None if lengths is None else tuple(lengths),
    )
    if lengths is not None and len(lengths) != world_size:
        raise HarnessError(f"lengths has {len(lengths)} entries for {world_size} ranks")
    outcomes: list[Outcome] = run_on_ranks(
        run_on_rank, case, world_size=world_size, timeout=timeout, check=False
    )
    others = [outcome for outcome in outcomes if not _is_refusal(outcome.error, error, match)]
    if not others:
        return [str(outcome.error) for outcome in outcomes]
    wanted = error.__name__ + ("" if match is None else f" matching {match!r}")
    lines = [f"expected {wanted} on each of {world_size} ranks, but"]
    lines += [f"rank {outcome.rank} {describe(outcome)}" for outcome in others]
    lines += [f"--- rank {outcome.rank}:\n{outcome.traceback}" for outcome in others if outcome.traceback]
    raise NotRefused("\n".join(lines))


def _options(
    options: dict[str, Any] | None, seq_dim: int, codegen: str, backend: Any
) -> dict[str, Any] | None:
    if backend != "zeco":  # a stand-in knows no options
        return options
    return {"seq_dim": seq_dim, "codegen": codegen, **(options or {})}


def _is_refusal(raised: BaseException | None, error: type[ZecoError], match: str | None) -> bool:
    if not isinstance(raised, error) or isinstance(raised, HarnessError):
        return False
    if isinstance(raised, InternalError) and not issubclass(error, InternalError):
        return False
    return match is None or re.search(match, str(raised)) is not None


def _compare_sums(answers: Sequence[Answer], case: Case) -> list[Difference]:
    """Gradients that each rank holds a part of: their sum over ranks against the unsharded gradient."""
    reference = answers[0].reference
    scales: dict[str, float] = {}
    for (kind, _), want in reference.items():
        scales[kind] = max(scales.get(kind, 0.0), rms(want))
    found = []
    for (kind, name), want in reference.items():
        terms = [answer.terms.get((kind, name)) for answer in answers]
        sizes = ", ".join("missing" if term is None else f"{rms(term):.3g}" for term in terms)
        where = f"sum over ranks (root mean square by rank: {sizes})"
        present = [term.to(want.dtype) for term in terms if term is not None]
        if len(present) < len(terms):
            found.append(fault(kind, name, where, "is missing on some rank", case.rtol))
        elif any(term.shape != want.shape for term in present):
            shapes = [list(term.shape) for term in present]
            found.append(fault(kind, name, where, f"shapes {shapes}, expected {list(want.shape)}", case.rtol))
        else:
            floor = case.floor(scales[kind])
            total = torch.stack(present).sum(0)
            found.append(compare(total, want, kind=kind, name=name, where=where, rtol=case.rtol, floor=floor))
    return found


def _dims_by_rank(answers: Sequence[Answer]) -> str:
    return "came back sliced along " + ", ".join(
        f"{list(a.output_dims)} on rank {rank}" for rank, a in enumerate(answers)
    )


def _badness(difference: Difference) -> float:
    return max(difference.relative, difference.elementwise)


def _worst(found: Iterable[Difference]) -> dict[str, Difference]:
    worst: dict[str, Difference] = {}
    for each in found:
        if each.kind not in worst or _badness(each) > _badness(worst[each.kind]):
            worst[each.kind] = each
    return worst


def _raise_unless_passed(found: Sequence[Difference], world_size: int) -> None:
    failed = sorted((each for each in found if not each.passed), key=_badness, reverse=True)
    if not failed:
        return
    lines = [f"{len(failed)} of {len(found)} tensors differ from the unsharded run on {world_size} ranks:"]
    lines += [f"  {each}" for each in failed[:_SHOWN]]
    if len(failed) > _SHOWN:
        lines.append(f"  and {len(failed) - _SHOWN} more")
    raise NotEquivalent("\n".join(lines))
