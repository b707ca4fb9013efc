"""Where the gate of a region comes from in the user's graph, and the log decay made of it there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.layout import GraphOperations
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import reason_against
from zeco_compile.passes.roles import (
    GATE_FORMS,
    GateForm,
    Roles,
)

aten = torch.ops.aten

Gate = tuple[fx.Node | None, GateForm | None, fx.Node | None]
"""(the value, how the log decay is made of it, where the state is kept), None where there is none of it."""


def gate_source(analysis: Analysis, roles: Roles) -> Gate:
    """The gate's input, or what it was computed from: the log decay under an `exp`, the logits under a sigmoid. And
    where the state is kept, if the decay is that times a mask (`a * ~reset`): elsewhere the log decay is -inf.

    The decay itself may be zero where its logarithm is an ordinary number.
    """
    node, form = roles.gate, roles.form
    if node is None or form is None or form.name != "log(a)":
        return node, form, None
    end = analysis.shadow.origin[roles.axes.output]
    current = _before_views(node)
    passed, found, kept = [node, current], node, None
    if (masked := _times_a_mask(current)) is not None and all(_has_a_name(analysis, each) for each in masked):
        found, kept = masked
        current = _before_views(found)
        passed += [found, current]
    forms = {f.name: f for f in GATE_FORMS}
    under: dict[Any, GateForm] = {aten.exp.default: forms["g"], aten.sigmoid.default: forms["logsigmoid(z)"]}
    inner, same = under.get(current.target), found is node or current is found
    if inner is not None and same and isinstance(current.args[0], fx.Node):
        source = current.args[0]
        if _has_a_name(analysis, source) and reason_against(analysis, passed, end) is None:
            return source, inner, kept
    if kept is not None and reason_against(analysis, passed, end) is None:
        return found, form, kept
    return node, form, None


def _before_views(node: fx.Node) -> fx.Node:
    views = ("view", "_unsafe_view", "permute", "transpose", "unsqueeze", "squeeze", "clone", "expand", "t")
    while getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in views:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _times_a_mask(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a product multiplies with a mask, and the mask, of true and false."""
    if node.target is not aten.mul.Tensor:
        return None
    factors = [n for n in node.args if isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor)]
    masks = [n for n in factors if n.meta["val"].dtype is torch.bool]
    others = [n for n in factors if n not in masks and n.meta["val"].shape == node.meta["val"].shape]
    return (others[0], masks[0]) if len(masks) == len(others) == 1 else None


def _has_a_name(analysis: Analysis, node: fx.Node) -> bool:
    """The value is that of a node of the user's graph."""
    user_node = analysis.shadow.origin.get(node)
    return node.op == "placeholder" or (
        user_node is not None and node in analysis.shadow.tensors_made(user_node)
    )


def emit_gate(ops: GraphOperations, form: GateForm, z: fx.Node, group: str) -> fx.Node:
    """The log decay in the user's graph."""
    call = ops.call
    if form.name == "g":
        return z
    if form.name == "-g":
        return call(torch.neg, z)
    if form.name == "logsigmoid(z)":
        return call(torch.nn.functional.logsigmoid, z)
    if form.name == "-exp(z)":
        return call(torch.neg, call(torch.exp, z))
    if form.name == "-softplus(z)":
        return call(torch.neg, call(torch.nn.functional.softplus, z))
    if form.name == "z * log(2)":
        return call(torch.mul, z, 0.6931471805599453)
    if form.name in ("log(a)", "log(1 - z)"):
        z = z if form.name == "log(a)" else call(aten.rsub.Scalar, z, 1)
        where = str(user_location(z))  # one line: Inductor writes it into the code that it generates
        return call(torch.ops.zeco.log_decay.default, z, where, group)
    raise AssertionError(f"no graph for the gate form {form.name}")


def emit_write_factor(ops: GraphOperations, name: str, log_decay: fx.Node) -> fx.Node:
    """`roles.WRITE_FACTORS[name]` in the user's graph."""
    call = ops.call
    if name == "1 - a":
        return call(torch.neg, call(torch.expm1, log_decay))
    if name == "sqrt(1 - a^2)":
        return call(torch.sqrt, call(torch.neg, call(torch.expm1, call(torch.mul, log_decay, 2))))
    raise AssertionError(f"no graph for the write factor {name}")
