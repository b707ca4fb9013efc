"""Rows that are updated in place: `y[:, -2:] *= 2`, and, from rows at other positions, `y[:, 1:] += x[:, :-1]`.

`write_out_updates` takes such a statement apart before anything is analysed: the rows are read, computed with, and
written, which the rules for each know; `write_in_updates` puts together again what no rule has changed.
`update_by_shift` is the rule for what combines rows of different windows and is written back into one of them: the
other one's rows come from the neighbour.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    current,
    halo_exchanges,
    holder_of,
    is_local,
    mixing_nodes,
    path_to_base,
    row_dim,
    window_of,
)
from zeco_compile.passes.schema import operand, shape, tensors

aten = torch.ops.aten
zeco = torch.ops.zeco

_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def write_out_updates(gm: fx.GraphModule) -> None:
    """`y[i] += v`, which is a view, an update of the view and a write of that to where it is already, becomes a view, a
    sum and a write. Values and gradients are the same, but where v is a view of y as well: where the two overlap, what
    eager computes depends on the order in which it does, and is left alone."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _IN_PLACE or len(node.args) != 2:
            continue
        part, write = node.args[0], node.next
        if not isinstance(part, fx.Node) or part.target is not operator.getitem or set(part.users) != {node}:
            continue
        made = part.meta.get("example_value")
        numeric = isinstance(made, torch.Tensor) and (made.dtype.is_floating_point or made.dtype.is_complex)
        back = (
            write.target is operator.setitem
            and write.args == (*part.args, node)
            and set(node.users) == {write}
        )
        if numeric and back and _root(node.args[1]) is not _root(part):
            node.meta[_WRITTEN_OUT] = node.target
            node.target = _IN_PLACE[node.target]


_WRITTEN_OUT = "zeco_written_out"
"""What a statement that has been taken apart was: `operator.iadd` and its like."""


def write_in_updates(gm: fx.GraphModule) -> int:
    """What is still as `write_out_updates` has left it is an update in place again; returns how many there are.

    A product needs its factors in the backward. In eager `y[i] *= v` keeps what y[i] was, but of `y[i] = y[i] * v` the
    view is written to.
    """
    put_together = 0
    for node in gm.graph.nodes:
        in_place, part, write = node.meta.pop(_WRITTEN_OUT, None), next(iter(node.args), None), node.next
        if in_place is None or not isinstance(part, fx.Node) or part.target is not operator.getitem:
            continue
        as_left = write.target is operator.setitem and write.args == (*part.args, node)
        if as_left and set(part.users) == {node} and set(node.users) == {write}:
            node.target = in_place
            put_together += 1
    return put_together


_VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "narrow", "select", "unsqueeze", "squeeze", "expand", "flatten",
        "t", "chunk", "split", "unbind", "detach", "view_as", "unflatten", "swapaxes", "movedim", "contiguous", "to",
    }
)  # fmt: skip


def _root(node: Any) -> Any:
    """What a view is one of, as far as its name says that it is a view."""
    while isinstance(node, fx.Node) and node.args:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op not in ("call_function", "call_method") or (name not in _VIEWS and name != "getitem"):
            break
        node = node.args[0]
    return node


_SHIFTED = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)


def update_by_shift(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`y[:, n:] = y[:, n:] + x[:, :-n]`, and its mirror, in what computes the sum or in the write of it."""
    if user_node.target is operator.setitem:
        value = user_node.args[2]
        if not isinstance(value, fx.Node) or update_by_shift(analysis, value) is None:
            return None
        return Plan("halo exchange", "written where it was computed", lambda ranks: None)
    mixing, writes = mixing_nodes(analysis, user_node), list(user_node.users)
    if len(mixing) != 1 or mixing[0].target not in _SHIFTED or analysis.own_mixing(mixing[0]):
        return None
    (node,) = mixing
    if analysis.shadow.groups.get(user_node) != [node] or len(user_node.args) != 2 or user_node.kwargs:
        return None
    if len(writes) != 1 or writes[0].target is not operator.setitem or writes[0].args[2] is not user_node:
        return None
    (write,) = writes
    into, part = write.args[0], user_node.args[0]
    if not isinstance(into, fx.Node) or not isinstance(part, fx.Node) or part.args != write.args[:2]:
        return None
    if part.target is not operator.getitem or len(tensors(node)) != 2:
        return None
    own, other = (path_to_base(analysis, each, user_node) for each in tensors(node))
    if own is None or other is None or own[1] or any(n.target is not aten.clone.default for n in other[1]):
        return None
    (written, _, window), (base, _, shifted) = own, other
    if tensors(node)[0] is not analysis.shadow.reads.get((user_node, part)):
        return None
    if analysis.shadow.reads.get((write, into)) is not written or not is_local(analysis, written):
        return None
    dim = row_dim(analysis, base)
    numbers = all(isinstance(each, int) for each in (*window, *shifted))
    if (
        dim is None
        or not numbers
        or window_of(analysis, base) != (0, 0)
        or window_of(analysis, written) != (0, 0)
    ):
        return None
    alike = (
        base.meta["val"].shape == written.meta["val"].shape
        and base.meta["val"].dtype == written.meta["val"].dtype
    )
    shift = shifted[0] - window[0]  # row r of what is written takes row r - shift of the other
    if not alike or row_dim(analysis, written) != dim or operand(node, 0).meta["val"].dtype.is_complex:
        return None
    if any(_without(dim, each) != _without(dim, base) for each in tensors(node)):
        return None  # some features, or sequences
    if analysis.state(node) is State.MIXED and any(not is_local(analysis, each) for each in (base, written)):
        return None
    holder = holder_of(analysis, base, user_node)
    if holder is None or shift == 0 or max(window) > 0 or max(shifted) > 0:
        return None
    before, after = max(shift, 0), max(-shift, 0)

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        target: Any = write.args[0]  # as it is by then
        rows = emit.call(zeco.halo.default, current(holder), dim, before, after, 0.0, ranks.group)
        length = emit.call(aten.sym_size.int, current(holder), dim)
        rows = emit.call(aten.narrow.default, rows, dim, 0 if shift > 0 else after, length)
        old = emit.call(aten.clone.default, target)  # a product needs it in its backward
        new = emit.call(user_node.target, old, rows)
        place = emit.call(torch.arange, length, device=written.meta["val"].device)
        place = emit.call(torch.add, place, emit.call(operator.mul, length, ranks.rank))
        total = emit.call(operator.mul, length, ranks.world_size)
        end = emit.call(operator.add, total, window[1])
        inside = emit.call(
            torch.logical_and, emit.call(torch.ge, place, -window[0]), emit.call(torch.lt, place, end)
        )
        ones = [1] * (written.meta["val"].dim() - 1 - dim)
        inside = emit.call(torch.reshape, inside, [-1, *ones])
        emit.call(aten.copy_.default, target, emit.call(torch.where, inside, new, old))

    return Plan(
        "halo exchange",
        f"rows updated by those {abs(shift)} {'before' if shift > 0 else 'behind'}",
        apply,
        halo_exchanges(analysis, base, dim, before, after),
        covers=(user_node, write),
    )


def _without(dim: int, node: fx.Node) -> tuple[Any, ...]:
    return (*shape(node)[:dim], *shape(node)[dim + 1 :])
