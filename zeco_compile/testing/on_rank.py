"""What one rank does with one example: the model in eager on all of it, compiled on its slice, and compare.

What a rank can judge by itself (its outputs, the gradients of its slices, its buffers) is compared here;
gradients that are only right as a sum over ranks (parameters, inputs without a sequence dimension) are
sent to the caller. There is no collective in this file: ranks meet only inside the model under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zeco_compile
from zeco_compile.testing.compare import Difference, compare, fault, rms, rounding_floor
from zeco_compile.testing.errors import HarnessError
from zeco_compile.testing.inputs import Inputs, Slice, carry_mark, from_user, slices

OUTPUT, INPUT, PARAMETER, BUFFER = "output", "input gradient", "parameter gradient", "buffer"

Term = tuple[str, str]  # kind and name of a gradient that is summed over ranks


@dataclass(frozen=True)
class Case:
    """One example, as it travels to the ranks; the fields are the arguments of ``assert_equivalent``."""

    make_model: Callable[[], Callable[..., Any]]
    make_inputs: Callable[[], Any]
    backend: Any
    options: dict[str, Any] | None
    seq_dim: int
    dtype: torch.dtype | None
    reference_dtype: torch.dtype | None
    rtol: float
    atol: float | None
    backward: bool
    seed: int
    fullgraph: bool
    dynamic: bool | None
    contiguous: bool
    output_dims: tuple[int | None, ...] | None = None
    lengths: tuple[int, ...] | None = None

    def floor(self, scale: float) -> float:
        """The root-mean-square error that counts as rounding among tensors of this scale."""
        return rounding_floor(self.dtype, scale) if self.atol is None else self.atol


@dataclass(frozen=True)
class Answer:
    """A rank's own comparisons, its terms of the sums, and (from rank 0) what the sums must be."""

    differences: list[Difference]
    output_dims: tuple[int | None, ...]
    terms: dict[Term, Tensor]
    reference: dict[Term, Tensor]
    report: dict[str, Any]


@dataclass
class _Run:
    """A model, the inputs it was given, and what came out."""

    model: Callable[..., Any]
    inputs: Inputs
    outputs: list[Any]
    names: list[str]
    spec: pytree.TreeSpec
    buffers: dict[str, Tensor]

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [
            (n, leaf) for n, leaf in zip(self.names, self.outputs, strict=True) if isinstance(leaf, Tensor)
        ]

    def backward(self, cotangents: list[Tensor]) -> None:
        pairs = [
            (tensor, cotangent)
            for (_, tensor), cotangent in zip(self.tensors(), cotangents, strict=True)
            if tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [cotangent for _, cotangent in pairs])


def compare_on_rank(case: Case) -> Answer:
    """Both runs and their comparison; the body of ``assert_equivalent`` on one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = _run(_model(case, case.reference_dtype), _inputs(case, case.reference_dtype, case.backward))
    full = _inputs(case, case.dtype, requires_grad=False)
    places = slices(full, case.seq_dim, rank, world_size, case.lengths)
    report_before = _last_report()
    compiled = _run_compiled(case, full, places)
    report = _new_report(case, report_before)

    outputs = _Outputs(case, reference, compiled, places, rank, world_size)
    differences = outputs.compare()
    differences += _compare_buffers(case, reference, compiled, f"rank {rank}")
    if not case.backward:
        return Answer(differences, outputs.dims, {}, {}, report)

    full_cotangents, cotangents = outputs.cotangents()
    reference.backward(full_cotangents)
    compiled.backward(cotangents)
    differences += _compare_slices(case, reference, compiled, places, f"rank {rank}")
    terms = _terms(compiled, places)
    return Answer(differences, outputs.dims, terms, _terms(reference, places) if rank == 0 else {}, report)


def run_on_rank(case: Case) -> str:
    """The body of ``assert_refused``: runs the compiled model on this rank's slice, after the eager one."""
    _run(_model(case, case.dtype), _inputs(case, case.dtype, requires_grad=False))
    full = _inputs(case, case.dtype, requires_grad=False)
    places = slices(full, case.seq_dim, dist.get_rank(), dist.get_world_size(), case.lengths)
    compiled = _run_compiled(case, full, places)
    if case.backward:
        compiled.backward([torch.ones_like(tensor) for _, tensor in compiled.tensors()])
    return f"ran, and returned {pytree.tree_map(_described, compiled.outputs)}"


def _described(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _model(case: Case, dtype: torch.dtype | None) -> Callable[..., Any]:
    _seed(case.seed)
    model = case.make_model()
    if isinstance(model, nn.Module) and dtype is not None:
        # By way of the compiled run's dtype, so that both hold the same numbers.
        model._apply(lambda tensor: _cast(_cast(tensor, case.dtype), dtype))
    return model


def _inputs(case: Case, dtype: torch.dtype | None, requires_grad: bool) -> Inputs:
    _seed(case.seed)
    made = from_user(case.make_inputs())

    def change(tensor: Tensor) -> Tensor:
        leaf = _cast(_cast(tensor.detach(), case.dtype), dtype)
        return carry_mark(tensor, leaf.clone().requires_grad_(requires_grad and _differentiable(leaf)))

    return made.each(change)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _run_compiled(case: Case, full: Inputs, places: list[Slice]) -> _Run:
    torch._dynamo.reset()
    model = _model(case, case.dtype)
    compiled = torch.compile(
        model, backend=case.backend, fullgraph=case.fullgraph, dynamic=case.dynamic, options=case.options
    )
    place_of = {id(leaf): place for leaf, place in zip(full.leaves, places, strict=True)}

    def mine(tensor: Tensor) -> Tensor:
        # A copy: a rank holds its slice as a tensor of its own, not as a window on the memory of the whole.
        place = place_of[id(tensor)]
        part = place.of(tensor).clone() if case.contiguous else place.of(tensor.detach().clone())
        return carry_mark(tensor, part.requires_grad_(case.backward and _differentiable(part)))

    return _run(compiled, full.each(mine), model)


def _run(function: Callable[..., Any], inputs: Inputs, model: Callable[..., Any] | None = None) -> _Run:
    returned = inputs.call(function)
    paths, spec = pytree.tree_flatten_with_path(returned)
    model = model if model is not None else function
    named = model.named_buffers() if isinstance(model, nn.Module) else ()
    return _Run(
        model=model,
        inputs=inputs,
        outputs=[leaf for _, leaf in paths],
        names=["output" + pytree.keystr(path) for path, _ in paths],
        spec=spec,
        buffers={name: buffer.detach().clone() for name, buffer in named},
    )


class _Outputs:
    """The outputs of both runs side by side; ``dims`` says how each tensor came back."""

    def __init__(
        self, case: Case, reference: _Run, compiled: _Run, places: list[Slice], rank: int, world_size: int
    ) -> None:
        self.case, self.reference, self.compiled = case, reference, compiled
        self.rank, self.world_size = rank, world_size
        self.where = f"rank {rank}"
        self.leading = _leading(reference.inputs, places)
        self.dims: tuple[int | None, ...] = ()

    def compare(self) -> list[Difference]:
        case = self.case
        if self.reference.spec != self.compiled.spec:
            raise HarnessError(
                f"{self.where}: the compiled model returned {self.compiled.spec}, eager {self.reference.spec}"
            )
        wants, gots = self.reference.tensors(), self.compiled.tensors()
        found = [
            fault(OUTPUT, name, self.where, f"{got!r}, expected {want!r}", case.rtol)
            for name, want, got in zip(
                self.reference.names, self.reference.outputs, self.compiled.outputs, strict=True
            )
            if not (isinstance(want, Tensor) and isinstance(got, Tensor)) and not _same_value(name, want, got)
        ]
        if len(wants) != len(gots):
            return found
        stated = case.output_dims
        if stated is not None and len(stated) != len(wants):
            raise HarnessError(
                f"output_dims has {len(stated)} entries, the model returns {len(wants)} tensors"
            )
        scale = max((rms(want) for _, want in wants), default=0.0)
        dims = []
        for index, ((name, want), (_, got)) in enumerate(zip(wants, gots, strict=True)):
            dim = stated[index] if stated is not None and self.world_size > 1 else self._dim(want, got)
            dims.append(dim)
            found += self._compare_one(name, want, got, dim, case.floor(scale))
        self.dims = tuple(dims)
        return found

    def _compare_one(
        self, name: str, want: Tensor, got: Tensor, dim: int | None, floor: float
    ) -> list[Difference]:
        rtol, found = self.case.rtol, []
        if self.case.reference_dtype == self.case.dtype and got.dtype != want.dtype:
            found.append(fault(OUTPUT, name, self.where, f"{got.dtype}, expected {want.dtype}", rtol))
        if self.case.backward and got.requires_grad != want.requires_grad:
            what = f"requires_grad is {got.requires_grad}, expected {want.requires_grad}"
            found.append(fault(OUTPUT, name, self.where, what, rtol))
        if dim is None and got.shape == want.shape and self._runs_along_sequence(want):
            what = (
                f"shape {list(got.shape)} came back whole on every rank, though it has the sequence's length"
                f" in dimension {len(self.leading or ()) - 1}; say output_dims=[None] if that is no sequence"
            )
            return [*found, fault(OUTPUT, name, self.where, what, rtol)]
        expected = self._slice(want, dim)
        return [
            *found,
            compare(got, expected, kind=OUTPUT, name=name, where=self.where, rtol=rtol, floor=floor),
        ]

    def _dim(self, want: Tensor, got: Tensor) -> int | None:
        """The dimension along which ``got`` is this rank's share of ``want``; None when it is all of it."""
        if got.dim() != want.dim():
            return None
        differing = [d for d in range(want.dim()) if got.shape[d] != want.shape[d]]
        if len(differing) == 1 and got.shape[differing[0]] * self.world_size == want.shape[differing[0]]:
            return differing[0]
        return None

    def _runs_along_sequence(self, want: Tensor) -> bool:
        if self.case.output_dims is not None or self.world_size == 1 or self.leading is None:
            return False
        return tuple(want.shape[: len(self.leading)]) == self.leading

    def _slice(self, full: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return full
        length = full.shape[dim] // self.world_size
        return full.narrow(dim, self.rank * length, length)

    def cotangents(self) -> tuple[list[Tensor], list[Tensor]]:
        """Random ones for the full outputs, and this rank's: its slice, or its share of what all have."""
        generator = torch.Generator().manual_seed(self.case.seed + 1)
        full, mine = [], []
        wants, gots = self.reference.tensors(), self.compiled.tensors()
        for index, ((_, want), (_, got)) in enumerate(zip(wants, gots, strict=False)):
            kind = torch.complex128 if want.is_complex() else torch.float64
            drawn = torch.randn(want.shape, generator=generator, dtype=kind)
            if _differentiable(got):
                drawn = drawn.to(got.dtype)
            full.append(drawn.to(want.dtype))
            dim = self.dims[index] if index < len(self.dims) else None
            part = self._slice(drawn, dim) if dim is not None else drawn / self.world_size
            # Where the shapes are wrong the backward still runs, since the other ranks may wait for it.
            mine.append(part.to(got.dtype) if part.shape == got.shape else torch.zeros_like(got))
        return full, mine


def _leading(inputs: Inputs, places: list[Slice]) -> tuple[int, ...] | None:
    """The shape of the first sliced input up to and with its sequence dimension."""
    for index, _, tensor in inputs.tensors():
        dim = places[index].dim
        if dim:
            return tuple(tensor.shape[: dim + 1])
    return None


def _same_value(name: str, want: Any, got: Any) -> bool:
    """Raises HarnessError for an object that holds tensors: which values are equal is not known of it."""
    if any(isinstance(held, Tensor) for held in getattr(want, "__dict__", {}).values()):
        raise HarnessError(
            f"{name} is a {type(want).__module__}.{type(want).__qualname__}, whose tensors the harness does not see: "
            "register it (torch.utils._pytree.register_dataclass(cls), or register_pytree_node), or wrap the model in "
            "one that returns a tuple or a dict of them"
        )
    return type(want) is type(got) and (want == got or (want != want and got != got))


def _compare_buffers(case: Case, reference: _Run, compiled: _Run, where: str) -> list[Difference]:
    scale = max((rms(buffer) for buffer in reference.buffers.values()), default=0.0)
    found = []
    for name, want in reference.buffers.items():
        got = compiled.buffers.get(name)
        if got is None:
            found.append(fault(BUFFER, name, where, "is no longer there", case.rtol))
        else:
            found.append(
                compare(
                    got, want, kind=BUFFER, name=name, where=where, rtol=case.rtol, floor=case.floor(scale)
                )
            )
    return found


def _compare_slices(
    case: Case, reference: _Run, compiled: _Run, places: list[Slice], where: str
) -> list[Difference]:
    """The gradient of every input of which this rank has a slice, against that slice of the full gradient."""
    wants = {
        index: (name, _gradient(tensor))
        for index, name, tensor in reference.inputs.tensors()
        if _leaf(tensor)
    }
    scale = max((rms(want) for _, want in wants.values()), default=0.0)
    found = []
    for index, _, tensor in compiled.inputs.tensors():
        if index in wants and places[index].dim is not None:
            name, want = wants[index]
            found.append(
                compare(
                    _gradient(tensor),
                    places[index].of(want),
                    kind=INPUT,
                    name=name,
                    where=where,
                    rtol=case.rtol,
                    floor=case.floor(scale),
                )
            )
    return found


def _leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _gradient(tensor: Tensor) -> Tensor:
    """Unused means a gradient of zero, whether autograd says None or not."""
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    gradient = tensor.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient  # as `nn.Embedding(sparse=True)` has them


def _terms(run: _Run, places: list[Slice]) -> dict[Term, Tensor]:
    terms: dict[Term, Tensor] = {}
    if isinstance(run.model, nn.Module):
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad:
                terms[PARAMETER, name] = _gradient(parameter)
    for index, name, tensor in run.inputs.tensors():
        if places[index].dim is None and _leaf(tensor):
            terms[INPUT, name] = _gradient(tensor)
    return terms


def _last_report() -> Any:
    last_report = getattr(zeco_compile, "last_report", None)
    return None if last_report is None else last_report()


def _new_report(case: Case, before: Any) -> dict[str, Any]:
    """What the backend said about this example. A report that was there before means that it never ran."""
    report = _last_report()
    if case.backend != "zeco":
        return {}
    if report is None or report is before:
        raise HarnessError(
            "the backend was never called: Dynamo found nothing to compile or gave up on the frame, so the"
            " model ran in eager on the slice"
        )
    plain: dict[str, Any] = report.to_dict()
    return plain
