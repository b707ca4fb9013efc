"""What the user's code asks of autograd and autocast where an op stands: gradients off, another precision, a backward
of its own.

The shadow shows values, and computes them without gradients. A rewrite that moves ops, or replaces them by something
that computes the same, must ask here whether it may: two ops in different modes are different ops, and what stops a
gradient or gives it another value is no part of a function of values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.locations import expression, user_location

aten = torch.ops.aten

Mode = tuple[object, ...]

AS_CALLED: Mode = ("as it was called",)


def modes(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """The mode in which each node runs: whether gradients are on, and the contexts that it is in, but for those that
    change nothing."""
    (as_called,) = AS_CALLED
    grad = as_called
    entered: list[fx.Node] = []
    out: dict[fx.Node, Mode] = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            grad = node.args[0] if node.args[0] != torch.is_grad_enabled() else as_called
        elif name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_") and entered:
            entered.pop()
        out[node] = (
            grad,
            *(each for at, each in enumerate(entered) if not _changes_nothing(each, entered[:at])),
        )
    return out


def _changes_nothing(entering: fx.Node, around: Sequence[fx.Node]) -> bool:
    """An autocast that is off where none is on, as around what is to stay in float32."""
    if not _is_autocast(entering):
        return False
    kind, _, enabled, *_ = entering.args
    inside = any(other.args[:1] == (kind,) and other.args[2] for other in around if _is_autocast(other))
    return not enabled and not inside and not torch.is_autocast_enabled(str(kind))


def _is_autocast(entering: fx.Node) -> bool:
    return getattr(entering.target, "__name__", "") == "_enter_autocast"


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


_DIFFERENTIATION = (
    "torch.autograd", "torch._C._autograd", "torch._functorch.eager_transforms", "torch._functorch.predispatch",
    "torch._C._functorch",
)  # fmt: skip
"""Modules whose functions Dynamo puts into a graph that differentiates, or transforms what it computes."""

_NO_DIFFERENTIATION = frozenset(
    {
        "lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim",
        "_remove_batch_dim",
    }
)  # fmt: skip
"""What `torch.vmap` by itself puts there."""


def refuse_inner_gradients(gm: fx.GraphModule) -> None:
    """Raises UnsupportedOp where the model itself differentiates (`torch.func.grad`, `vjp`, `jvp`, `jacrev`,
    `torch.autograd.grad`): the gradient with respect to something that all positions share is a sum over positions,
    that of one position may come from others, and none of it shows in the values that the graph computes."""
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    found = [node for body in bodies for node in body.graph.nodes if _differentiates(node)]
    if found:
        node = next((each for each in found if user_location(each).known), found[0])
        raise UnsupportedOp(
            "a gradient taken inside of the model",
            location=user_location(node),
            why=f"the model differentiates what it computes (`{getattr(node.target, '__name__', node.target)}` in the "
            "graph): what it would get is the gradient of this rank's part alone.",
            hints=[
                "write the derivative out, or make this call outside of the compiled function",
            ],
            node=str(node),
        )


def _differentiates(node: fx.Node) -> bool:
    return is_transform(node) and getattr(node.target, "__name__", "") not in _NO_DIFFERENTIATION


def is_transform(node: fx.Node) -> bool:
    """It begins, ends or feeds a transform of what stands around it: a gradient, or `torch.vmap`."""
    if node.op == "call_method":
        return node.target == "backward"
    operators = torch._ops.OpOverload | torch._ops.HigherOrderOperator
    if node.op != "call_function" or isinstance(node.target, operators):
        return False
    module = str(getattr(node.target, "__module__", None) or "")
    within = any(module == each or module.startswith(f"{each}.") for each in _DIFFERENTIATION)
    return within and not module.startswith("torch.autograd.profiler")


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
        if not has_gradient(value):
            continue
        if changes_gradient(origin) or node.target is aten.detach.default:
            return f"{expression(origin, str(origin))} in it changes the gradient, or stops it"
        if mode_of.get(origin) != mode_of.get(at):
            inner, end = expression(origin, str(origin)), expression(at, str(at))
            return f"{inner} in it runs in another mode (no_grad, autocast) than the end of it, {end}"
    return None


def stops_gradient(analysis: Analysis, node: fx.Node) -> bool:
    """An ATen node that is `x.detach()` in the user's code, and nothing else: written again, it does the same."""
    origin = analysis.shadow.origin.get(node)
    plain = origin is not None and origin.target in (
        "detach",
        torch.detach,
        aten.detach.default,
        torch.Tensor.detach,
    )
    return plain and node.target is aten.detach.default


def without_gradient(analysis: Analysis, interior: Collection[fx.Node], output: fx.Node) -> set[fx.Node]:
    """The `detach` nodes in what computes `output`, if no gradient gets past them to anything outside; none if one
    does."""
    inside, stops = set(interior), set[fx.Node]()
    stack, seen = [output], {output}
    while stack:
        node = stack.pop()
        if stops_gradient(analysis, node):
            stops.add(node)
            continue
        value = node.meta.get("val")
        if analysis.is_constant(node) or not has_gradient(value):
            continue
        if node not in inside:
            return set()
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        stack += new
    return stops


def has_gradient(value: object) -> bool:
    """It may have one: a number, and a tensor of whole numbers, does not."""
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, list | tuple)
