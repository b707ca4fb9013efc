"""Which inputs of a graph run along the sequence, and in which dimension.

A placeholder of Dynamo's graph is an argument of the user's model, or something the model owns: a parameter, a
buffer, a tensor in an attribute or a closure. What the model owns is whole on every rank. An argument is a slice
along `seq_dim`, unless it is marked otherwise, or has no dimensions at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.errors import SequenceInputError

MARK = "_zeco_sequence_dim"
"""Attribute that `mark_sequence` sets on a tensor: a dimension, or None for "has no sequence dimension"."""


@dataclass(frozen=True)
class GraphInput:
    """One placeholder. `kind` is "argument", "parameter", "buffer" (any tensor that the model owns and that is no
    parameter), "size" (of another input, or a stride or an offset) or "number"; `along` the dimension that runs along
    the sequence, None if none does."""

    node: fx.Node
    index: int
    kind: str
    name: str
    along: int | None


def graph_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any], seq_dim: int) -> list[GraphInput]:
    """The placeholders of `gm` in order. Raises SequenceInputError for an argument that lacks its dimension,
    or is empty."""
    out: list[GraphInput] = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        name = torch_private.source_name(node) or str(node.target)
        if not isinstance(value, torch.Tensor):
            kind = "size" if torch_private.is_of_a_tensor(node) else "number"
            out.append(GraphInput(node, index, kind, name, None))
        elif not torch_private.is_argument(node):
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
            out.append(GraphInput(node, index, kind, name, _marked(value, name, None)))
        else:
            along = _marked(value, name, seq_dim if value.dim() else None)
            if along is not None and value.numel() == 0:
                raise SequenceInputError(
                    name,
                    tuple(value.shape),
                    "it is empty, and nothing can be told of a model from nothing.",
                    hints=["leave the call out on every rank where there is nothing to compute"],
                )
            out.append(GraphInput(node, index, "argument", name, along))
    return out


def first_device(example_inputs: Sequence[Any]) -> torch.device:
    """Where the first tensor is; the CPU if there is none."""
    devices = (value.device for value in example_inputs if isinstance(value, torch.Tensor))
    return next(devices, torch.device("cpu"))


def _marked(value: torch.Tensor, name: str, default: int | None) -> int | None:
    along = getattr(value, MARK, default)
    if along is None:
        return None
    if not -value.dim() <= along < value.dim():
        raise SequenceInputError(
            name, tuple(value.shape), f"it has no dimension {along}, which the sequence is said to run along."
        )
    return along % value.dim()


def local_length(
    inputs: Sequence[GraphInput], fakes: Sequence[Any], values: Sequence[Any]
) -> int | torch.SymInt | None:
    """The rows of this rank's slice, from the fake inputs; None if no input runs along the sequence.

    `values` are the real inputs, for the message. Raises SequenceInputError where two inputs have different lengths.
    """
    first: GraphInput | None = None
    for each in inputs:
        if each.along is None:
            continue
        size = fakes[each.index].shape[each.along]
        if first is None:
            first, length = each, size
        elif size != length:  # for symbols this is a guard: they are one from here on
            shape, rows = values[each.index].shape, values[first.index].shape[first.along]
            raise SequenceInputError(
                each.name,
                tuple(shape),
                f"dimension {each.along} has {shape[each.along]} rows, but the sequence dimension of `{first.name}` "
                f"(dimension {first.along}) has {rows}. Inputs along the sequence are sliced alike.",
            )
    return None if first is None else length
