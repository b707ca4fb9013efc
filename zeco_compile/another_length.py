"""The user's function traced for another length than it was called with. Nothing is run: the inputs of such a trace are
the given ones, repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile import torch_private
from zeco_compile.passes.errors import CompileError
from zeco_compile.passes.inputs import MARK, GraphInput
from zeco_compile.passes.locations import Location, user_location
from zeco_compile.passes.torch_private import mark_weakly_dynamic


def longer_inputs(
    inputs: Sequence[GraphInput],
    example_inputs: Sequence[Any],
    longer: int,
    *,
    symbolic: bool,
    contiguous: bool = False,
) -> dict[int, torch.Tensor]:
    """The inputs along the sequence with so many rows, by the identity of those given; with a symbol for their number
    if the code allows it, where that is asked for; `contiguous`, or laid out as those given are."""
    replaced: dict[int, torch.Tensor] = {}
    for each in inputs:
        if each.along is None:
            continue
        tensor = example_inputs[each.index]
        other = (_repeated if contiguous else lengthened)(tensor.detach(), each.along, longer)
        if hasattr(tensor, MARK):
            setattr(other, MARK, getattr(tensor, MARK))
        if symbolic:
            mark_weakly_dynamic(other, each.along)
        replaced[id(tensor)] = other.requires_grad_(tensor.requires_grad)
    return replaced


def _repeated(tensor: torch.Tensor, along: int, longer: int) -> torch.Tensor:
    return tensor.index_select(along, torch.arange(longer, device=tensor.device) % tensor.shape[along])


def lengthened(tensor: torch.Tensor, along: int, longer: int) -> torch.Tensor:
    """The tensor repeated to so many rows, with the strides that the like of it of this length has: a slice of a larger
    tensor, which a rank's input may be, is not contiguous, and PyTorch's ops take another way with it."""
    length = tensor.shape[along]
    repeated = _repeated(tensor, along, longer)
    strides = list(tensor.stride())
    outer = sorted(
        (stride, -dim, dim) for dim, stride in enumerate(strides) if _is_outside(tensor, dim, along)
    )
    before = after = 1
    for place, (stride, _, dim) in enumerate(outer):
        if place == 0:
            strides[dim] = stride + (longer - length) * tensor.stride(along)
        else:  # what could be merged before can be merged, and nothing else
            strides[dim] = stride // before * after + stride % before
        before, after = stride, strides[dim]
    spread = [1 if stride == 0 else size for size, stride in zip(repeated.shape, strides, strict=True)]
    if not _is_free_of_overlaps(spread, strides):
        return repeated
    other = torch.empty_strided(spread, strides, dtype=tensor.dtype, device=tensor.device)
    other.copy_(repeated.as_strided(spread, repeated.stride()))
    return other.expand(repeated.shape)


def _is_outside(tensor: torch.Tensor, dim: int, along: int) -> bool:
    """Dimension `dim` steps over whole runs of dimension `along`."""
    stride, inner = tensor.stride(dim), tensor.stride(along)
    return dim != along and (stride > inner or (stride == inner > 0 and dim < along))


def _is_free_of_overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    end = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1
    ):
        if stride < end:
            return False
        end = stride * size
    return True


def look_at(
    replaced: dict[int, torch.Tensor], look: Callable[[fx.GraphModule, Sequence[Any]], None]
) -> Exception | None:
    """Traces the function that is being compiled for these inputs and shows `look` the graph, and its inputs. Returns
    what went wrong. To be called within the compilation of a graph."""
    failed: list[Exception] = []

    def replacing(value: Any) -> Any:
        return replaced.get(id(value), value)

    def backend(other: fx.GraphModule, others: Sequence[Any]) -> Callable[..., Any]:
        try:
            look(other, others)
        except Exception as error:
            failed.append(error)
        raise _Seen()

    try:
        torch_private.root_frame().compile(
            lambda tree: pytree.tree_map_only(torch.Tensor, replacing, tree), backend
        )
    except _Seen:
        pass
    except Exception as error:
        failed.append(error)
    return failed[0] if failed else None


def first_location(gm: fx.GraphModule) -> Location:
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    return user_location(calls[0] if calls else None)


class _Seen(CompileError):
    """Ends the other compilation: the trace has been seen."""

    def __init__(self) -> None:
        super().__init__("the graph has been seen, and will not be run.")
