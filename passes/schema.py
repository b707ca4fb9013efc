"""Reading an ATen node: arguments by name, tensor inputs, sizes."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.sizes import size_of


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument called `name` in the op's schema, given or default."""
    schema = node.target._schema  # type: ignore[union-attr]
    for index, parameter in enumerate(schema.arguments):
        if parameter.name == name:
            if index < len(node.args) and not parameter.kwarg_only:
                return node.args[index]
            if name in node.kwargs:
                return node.kwargs[name]
            return parameter.default_value if parameter.has_default_value() else default
    return default


def operand(node: fx.Node, index: int) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), f"argument {index} of {node} is no node"
    return value


def operands(node: fx.Node, index: int = 0) -> list[fx.Node]:
    """A positional argument that is a list of nodes."""
    value = node.args[index]
    assert isinstance(value, list | tuple), f"argument {index} of {node} is no list"
    return [each for each in value if isinstance(each, fx.Node)]


def tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def following(nodes: Collection[fx.Node], but: Container[Any] = ()) -> set[fx.Node]:
    """All that is computed from these nodes, and they, but for calls of `but` and what is computed from those alone."""
    found, stack = set(nodes), list(nodes)
    while stack:
        for user in stack.pop().users:
            if user not in found and user.target not in but:
                found.add(user)
                stack.append(user)
    return found


def shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(size_of(s) for s in node.meta["val"].shape)


WRITES = (torch.ops.aten.select_scatter.default, torch.ops.aten.slice_scatter.default)
"""They put rows into a copy of what they write to."""

RESHAPES = (
    torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default
)  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """The op draws numbers: made a second time, its value is another one."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
