"""What the user's code asks of autograd and autocast where an op stands: gradients off, another precision, a backward
of its own.

The shadow shows values, and computes them without gradients. A rewrite that moves ops, or replaces them by something
that computes the same, must ask here whether it may: two ops in different modes are different ops, and what stops a
gradient or gives it another value is no part of a function of values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.locations import user_location

aten = torch.ops.aten

Mode = tuple[object, ...]

AS_CALLED: Mode = ("as it was called",)


def modes(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """The mode in which each node runs: whether gradients are on, and the contexts that it is in."""
    (as_called,) = AS_CALLED
    grad = as_called
    entered: list[object] = []
    out: dict[fx.Node, Mode] = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            grad = node.args[0] if node.args[0] != torch.is_grad_enabled() else as_called
        elif name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_") and entered:
            entered.pop()
        out[node] = (grad, *entered)
    return out


_STOPS = ("detach", "detach_", "_get_data_attr", "requires_grad_", "register_hook")


def changes_gradient(node: fx.Node) -> bool:
    """The gradient through this node of the user's graph is not that of the values it computes."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _STOPS


def refuse_hooks(gm: fx.GraphModule) -> None:
    """Raises UnsupportedOp for a hook on a gradient: the value that it stands on may not be there any more."""
    for node in gm.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if "register_hook" in str(name) or name == "register_post_accumulate_grad_hook":
            raise UnsupportedOp(
                "Tensor.register_hook",
                location=user_location(node),
                why="a hook on the gradient of a value inside of the model: the value may be computed in another way, "
                "or not at all.",
                hints=["register it on an input or a parameter, outside of the compiled function"],
                node=str(node),
            )


def reason_against(analysis: Analysis, interior: Iterable[fx.Node], at: fx.Node) -> str | None:
    """Why what these ATen nodes compute cannot be computed in another way where `at` stands; None if it can.

    Constants do not matter: no gradient reaches them.
    """
    mode_of = modes(at.graph)
    for node in interior:
        origin = analysis.shadow.origin.get(node)
        value = node.meta.get("val")
        if origin is None or analysis.is_constant(node) or not isinstance(value, torch.Tensor):
            continue
        if not value.dtype.is_floating_point:
            continue
        if changes_gradient(origin) or node.target is aten.detach.default:
            return f"`{origin}` in it changes the gradient, or stops it"
        if mode_of.get(origin) != mode_of.get(at):
            return f"`{origin}` in it runs in another mode (no_grad, autocast) than the end of it, `{at}`"
    return None
