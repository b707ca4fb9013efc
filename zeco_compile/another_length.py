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
    inputs: Sequence[GraphInput], example_inputs: Sequence[Any], longer: int, *, symbolic: bool
) -> dict[int, torch.Tensor]:
    """The inputs along the sequence with so many rows, by the identity of those given; with a symbol for their number
    if the code allows it, where that is asked for."""
    replaced: dict[int, torch.Tensor] = {}
    for each in inputs:
        if each.along is None:
            continue
        tensor = example_inputs[each.index]
        rows = torch.arange(longer, device=tensor.device) % tensor.shape[each.along]
        with torch.no_grad():
            other = tensor.detach().index_select(each.along, rows)
        if hasattr(tensor, MARK):
            setattr(other, MARK, getattr(tensor, MARK))
        if symbolic:
            mark_weakly_dynamic(other, each.along)
        replaced[id(tensor)] = other.requires_grad_(tensor.requires_grad)
    return replaced


def look_at(
    replaced: dict[int, torch.Tensor], look: Callable[[fx.GraphModule, Sequence[Any]], None]
) -> Exception | None:
    """Traces the function that is being compiled for these inputs and shows `look` the graph, and its inputs. Returns
    what went wrong. To be called within the compilation of a graph."""
    failed: list[Exception] = []

    def lengthened(value: Any) -> Any:
        return replaced.get(id(value), value)

    def backend(other: fx.GraphModule, others: Sequence[Any]) -> Callable[..., Any]:
        try:
            look(other, others)
        except Exception as error:
            failed.append(error)
        raise _Seen()

    try:
        torch_private.root_frame().compile(
            lambda tree: pytree.tree_map_only(torch.Tensor, lengthened, tree), backend
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
