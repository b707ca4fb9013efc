"""Rules for ops that look at the rows next to a row: convolutions, padding, shifts. They get the neighbour's rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.plans import (
    Emit,
    Plan,
    Ranks,
    bytes_of,
    call_arguments,
    current,
    halo_exchanges,
    holder_of,
    kinds,
    mixing_nodes,
    path_to_base,
    row_dim,
    settle,
    single_output,
    substitute,
)
from zeco_compile.passes.schema import argument, operand, operands, shape

aten = torch.ops.aten
zeco = torch.ops.zeco


def convolution(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    if user_node.target not in (torch.conv1d, torch.conv2d, torch.conv3d, *_CONV_FUNCTIONS):
        return None
    mixing = mixing_nodes(analysis, user_node)
    if not 1 <= len(mixing) <= 2 or mixing[-1].target is not aten.convolution.default:
        return None
    *before, node = mixing
    source = operand(node, 0)
    uneven = 0  # by how much the padding behind is more than that in front
    if before:  # padding="same" with an even kernel
        (pad,) = before
        if pad.target is not aten.constant_pad_nd.default or source is not pad:
            return None
        source, (_, uneven, *others) = operand(pad, 0), argument(pad, "pad")
        if (
            argument(pad, "pad")[0] != 0
            or any(others)
            or row_dim(analysis, source) != source.meta["val"].dim() - 1
        ):
            return None
    dim = row_dim(analysis, source)
    result = single_output(analysis, user_node)
    if result is None or dim is None or dim < 2 or argument(node, "transposed"):
        return None
    spatial = dim - 2
    one = {name: argument(node, name) for name in ("stride", "padding", "dilation")}
    stride, padding, dilation = (v[spatial if len(v) > 1 else 0] for v in one.values())
    if stride != 1 or analysis.state(source) is State.MIXED:
        return None
    reach = (operand(node, 1).meta["val"].shape[2 + spatial] - 1) * dilation
    if kinds(analysis, node) - {"convolve", "window"}:
        return None
    crop_right = padding > 0 and not uneven and _cropped_right(analysis, node, padding)

    def apply(ranks: Ranks) -> None:
        given = call_arguments(user_node, _CONV_NAMES)
        if padding or uneven:
            emit = Emit(user_node, after=False)
            right = 0 if crop_right else padding + uneven
            rows = emit.call(zeco.halo.default, given["input"], dim, padding, right, 0.0, ranks.group)
            if crop_right:  # rows that are cut off again: whatever they hold
                amounts = [0] * (2 * (source.meta["val"].dim() - dim))
                amounts[-1] = padding
                rows = emit.call(aten.constant_pad_nd.default, rows, amounts, 0.0)
            paddings = list(one["padding"])
            paddings = paddings * (source.meta["val"].dim() - 2) if len(paddings) == 1 else paddings
            paddings[spatial] = 0
            user_node.args = ()
            user_node.kwargs = {**given, "input": rows, "padding": tuple(paddings)}
        settle(user_node)

    return Plan(
        "halo exchange",
        f"convolution over {reach + 1} rows; {padding} from the neighbour",
        apply,
        halo_exchanges(analysis, source, dim, padding, 0 if crop_right else padding + uneven),
    )


_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_FUNCTIONS = tuple(
    getattr(torch.nn.functional, name)
    for name in ("conv1d", "conv2d", "conv3d")
    if hasattr(torch.nn.functional, name)
)


def _cropped_right(analysis: Analysis, node: fx.Node, amount: int) -> bool:
    """Everybody who reads the convolution first cuts at least its last `amount` rows off."""
    dim = row_dim(analysis, node)
    if dim is None:
        return False
    for user in node.users:
        if user.target is not aten.slice.Tensor or argument(user, "dim", 0) % len(shape(node)) != dim:
            return False
        _, behind = analysis.track.cut(user, shape(node)[dim], shape(user)[dim])
        if not isinstance(behind, int) or behind < amount:
            return False
    return bool(node.users)


def windows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x.unfold(1, n, 1)`: every window of the rows that are there, those that padding has got from the neighbour
    included."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.unfold.default:
        return None
    (node,) = mixing
    source = operand(node, 0)
    if (
        kinds(analysis, node) != {"window"}
        or argument(node, "step") != 1
        or row_dim(analysis, source) is None
    ):
        return None
    if analysis.state(source) is State.MIXED or single_output(analysis, user_node) is not node:
        return None
    size = argument(node, "size")
    return Plan("position-local", f"windows of {size} rows of the slice", lambda ranks: settle(user_node))


def padding(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.constant_pad_nd.default:
        return None
    (node,) = mixing
    source = operand(node, 0)
    result = single_output(analysis, user_node)
    dim = row_dim(analysis, source)
    if result is not node or dim is None or analysis.state(source) is State.MIXED:
        return None
    amounts = list(argument(node, "pad"))
    place = 2 * (source.meta["val"].dim() - 1 - dim)
    left, right = amounts[place : place + 2]
    if not (isinstance(left, int) and isinstance(right, int)):
        return None
    base, base_window = source, (0, 0)
    if analysis.state(source) is State.WINDOW:
        found = path_to_base(analysis, source, user_node)
        if found is None or found[1]:
            return None
        base, _, base_window = found
    before, after = base_window
    if not (isinstance(before, int) and isinstance(after, int)):
        return None
    if (left > 0 and before < 0) or (right > 0 and after < 0):
        return None  # rows cut off and put back as padding: the ends of the whole sequence are blanked
    holder = holder_of(analysis, base, user_node)
    if holder is None:
        return None
    fill = argument(node, "value", 0)
    fill = 0.0 if fill is None else float(fill)
    window = (before + left, after + right)

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        rows = emit.call(
            zeco.halo.default, current(holder), dim, max(window[0], 0), max(window[1], 0), fill, ranks.group
        )
        rest = list(amounts)
        rest[place : place + 2] = [min(window[0], 0), min(window[1], 0)]
        if any(rest):
            rows = emit.call(aten.constant_pad_nd.default, rows, rest, fill)
        substitute(user_node, rows)

    return Plan(
        "halo exchange", f"padding: {max(window[0], 0)} rows before, {max(window[1], 0)} after", apply
    )


def concatenation(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`cat([first, x[:, :-n]])`, and its mirror: x shifted by n rows, with something else at the start."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.cat.default:
        return None
    (node,) = mixing
    parts = operands(node)
    dim = row_dim(analysis, node)
    if len(parts) != 2 or dim is None or single_output(analysis, user_node) is not node:
        return None
    if any(analysis.state(p) is State.MIXED for p in parts):
        return None
    user_parts = user_node.args[0] if user_node.args else user_node.kwargs.get("tensors")
    if not isinstance(user_parts, list | tuple) or len(user_parts) != 2:
        return None
    for edge, body in ((0, 1), (1, 0)):
        found = path_to_base(analysis, parts[body], user_node)
        if found is None or found[1]:
            continue
        base, _, window = found
        count = parts[edge].meta["val"].shape[dim]
        if not isinstance(count, int) or window != ((0, -count) if edge == 0 else (-count, 0)):
            continue
        holder = holder_of(analysis, base, user_node)
        if holder is None:
            continue
        return Plan(
            "halo exchange",
            f"shift by {count} row(s)",
            _shifted(user_node, edge, dim, count, holder),
            halo_exchanges(analysis, base, dim, *((count, 0) if edge == 0 else (0, count))),
        )
    return None


def rows_in_front(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`cat([first, x], 1)`: some rows in front of the sequence, as padding by rows would put them there. On every rank
    but the first it is the neighbour's rows that come before: no more than it has."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.cat.default:
        return None
    (node,) = mixing
    dim, parts = row_dim(analysis, node), operands(node)
    if len(parts) != 2 or dim is None or single_output(analysis, user_node) is not node:
        return None
    if any(analysis.state(part) is not State.LOCAL for part in parts):
        return None
    first, rows = parts
    count = first.meta["val"].shape[dim]
    whole = analysis.track.axes.is_whole_sequence(analysis.track.dims(rows)[dim])
    window = analysis.track.axes.window_of(analysis.track.dims(node)[dim])
    if not isinstance(count, int) or not whole or window != (count, 0) or analysis.track.sequence_dims(first):
        return None
    user_parts = user_node.args[0] if user_node.args else user_node.kwargs.get("tensors")
    if not isinstance(user_parts, list | tuple) or len(user_parts) != 2:
        return None
    if not 0 < count <= analysis.real_length:
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        given: Any = user_node.args[0] if user_node.args else user_node.kwargs["tensors"]
        edge, body = given  # as they are by then
        start = emit.call(operator.sub, emit.call(aten.sym_size.int, body, dim), count)
        # narrow, unlike a slice, raises where another call's slices have fewer rows
        last = emit.call(aten.narrow.default, body, dim, start, count)
        near = emit.call(zeco.halo.default, last, dim, count, 0, 0.0, ranks.group)
        near = emit.call(aten.slice.Tensor, near, dim, 0, count)
        here = emit.call(zeco.at_rank.default, near, 0, ranks.group)
        substitute(user_node, emit.call(torch.cat, [emit.call(torch.where, here, edge, near), body], dim))

    return Plan(
        "halo exchange",
        f"{count} row(s) in front of the sequence",
        apply,
        halo_exchanges(analysis, rows, dim, count, 0),
    )


def _shifted(user_node: fx.Node, edge: int, dim: int, count: int, holder: fx.Node) -> Callable[[Ranks], None]:
    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        parts: Any = user_node.args[0] if user_node.args else user_node.kwargs["tensors"]
        left, right = (count, 0) if edge == 0 else (0, count)
        rows = emit.call(zeco.halo.default, current(holder), dim, left, right, 0.0, ranks.group)
        start = 0 if edge == 0 else -count
        end = count if edge == 0 else 2**63 - 1
        neighbour = emit.call(aten.slice.Tensor, rows, dim, start, end)
        end_of_sequence = 0 if edge == 0 else ranks.world_size - 1
        mine = emit.call(zeco.at_rank.default, neighbour, end_of_sequence, ranks.group)
        chosen = emit.call(torch.where, mine, parts[edge], neighbour)
        joined = [chosen, parts[1]] if edge == 0 else [parts[0], chosen]
        new = emit.call(torch.cat, joined, dim)
        substitute(user_node, new)

    return apply


def rolled(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x.roll(n, 1)`: the neighbour's rows, and at one end of the sequence those of the other end."""
    mixing = mixing_nodes(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.roll.default:
        return None
    (node,) = mixing
    source = operand(node, 0)
    shifts, dims = argument(node, "shifts"), argument(node, "dims", [])
    dim, rank = row_dim(analysis, source), source.meta["val"].dim()
    if single_output(analysis, user_node) is not node or analysis.state(source) is not State.LOCAL:
        return None
    if dim is None or not analysis.track.axes.is_whole_sequence(analysis.track.dims(source)[dim]):
        return None
    if len(dims) != 1 or dims[0] % rank != dim or not isinstance(shifts[0], int):
        return None
    read = user_node.args[0] if user_node.args else None
    count, forwards = abs(shifts[0]), shifts[0] > 0
    if not isinstance(read, fx.Node) or analysis.shadow.reads.get((user_node, read)) is not source:
        return None
    if not 0 < count <= source.meta["val"].shape[dim]:  # a guard, where that is a symbol
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        read: Any = user_node.args[0]  # as it is by then
        far, last = (ranks.world_size - 1, 0) if forwards else (0, ranks.world_size - 1)
        start = emit.call(operator.sub, emit.call(aten.sym_size.int, read, dim), count) if forwards else 0
        # narrow, unlike a slice, raises where another call's slices have fewer rows
        edge = emit.call(aten.narrow.default, read, dim, start, count)
        edge = emit.call(zeco.from_rank.default, edge, far, ranks.group)
        rows = emit.call(
            zeco.halo.default, read, dim, *((count, 0) if forwards else (0, count)), 0.0, ranks.group
        )
        near = emit.call(aten.slice.Tensor, rows, dim, *((0, count) if forwards else (-count, _END)))
        here = emit.call(zeco.at_rank.default, read, last, ranks.group)
        end = emit.call(torch.where, here, edge, near)
        rest = emit.call(aten.slice.Tensor, read, dim, *((0, -count) if forwards else (count, _END)))
        substitute(user_node, emit.call(torch.cat, [end, rest] if forwards else [rest, end], dim))

    sent = halo_exchanges(analysis, source, dim, *((count, 0) if forwards else (0, count)))
    return Plan(
        "halo exchange",
        f"rows rolled by {count}, those of one end of the sequence to the other",
        apply,
        (*sent, ("among all ranks", bytes_of(analysis, source, dim, count))),
    )


_END = 2**63 - 1


def differences(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`torch.diff(x, dim=1, prepend=first)`: from each row the one before it (the shadow has it so, too)."""
    mixing = mixing_nodes(analysis, user_node)
    if user_node.target is not torch.diff or len(mixing) != 1 or mixing[0].target is not aten.cat.default:
        return None
    (node,) = mixing
    output, dim = single_output(analysis, user_node), row_dim(analysis, node)
    given = call_arguments(user_node, _DIFF_NAMES)
    if (
        output is None
        or output.target is not aten.sub.Tensor
        or operand(output, 1) is not node
        or dim is None
    ):
        return None
    source = analysis.shadow.reads.get((user_node, given["input"]))
    edge = analysis.shadow.reads.get((user_node, given["prepend"]))
    if not isinstance(source, fx.Node) or not isinstance(edge, fx.Node):
        return None
    if any(analysis.state(each) is not State.LOCAL for each in (source, edge)):
        return None
    if operands(node)[0] is not edge or analysis.track.sequence_dims(edge):
        return None
    if analysis.track.sequence_dims(source) != [dim]:
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        given = call_arguments(user_node, _DIFF_NAMES)  # as they are by then
        read, first = given["input"], given["prepend"]
        rows = emit.call(zeco.halo.default, read, dim, 1, 0, 0.0, ranks.group)
        here = emit.call(zeco.at_rank.default, read, 0, ranks.group)
        before = emit.call(torch.where, here, first, emit.call(aten.slice.Tensor, rows, dim, 0, 1))
        before = emit.call(torch.cat, [before, emit.call(aten.slice.Tensor, read, dim, 0, -1)], dim)
        substitute(user_node, emit.call(torch.sub, read, before))

    return Plan(
        "halo exchange",
        "differences of each row and the one before",
        apply,
        halo_exchanges(analysis, source, dim, 1, 0),
    )


_DIFF_NAMES = ("input", "n", "dim", "prepend", "append")


def written_shifted(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`p = zeros_like(x); p[:, n:] = x[:, :-n]`, and its mirror: x shifted by n rows, into zeros."""
    mixing = mixing_nodes(analysis, user_node)
    if user_node.target is not operator.setitem or len(mixing) != 1:
        return None
    (node,) = mixing
    if node.target is not aten.slice_scatter.default or not isinstance(user_node.args[0], fx.Node):
        return None
    written, source = operand(node, 0), operand(node, 1)
    dim = argument(node, "dim", 0) % written.meta["val"].dim()
    found = path_to_base(analysis, source, user_node)
    if (
        found is None
        or found[1]
        or written.target not in _ZEROS
        or analysis.state(written) is not State.LOCAL
    ):
        return None
    base, _, window = found
    if not analysis.track.axes.is_whole_sequence(analysis.track.dims(written)[dim]):
        return None
    left, right = (-each if isinstance(each, int) else 0 for each in window)
    count = max(left, right)
    start = argument(node, "start", 0) or 0
    forwards = (left, right) == (0, count) and start == count
    backwards = (left, right) == (count, 0) and start == 0
    holder = holder_of(analysis, base, user_node)
    whole, value = written.meta["val"], base.meta["val"]
    alike = whole.dtype == value.dtype and whole.shape == value.shape
    if count < 1 or not (forwards or backwards) or holder is None or not alike:
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        before, after = (count, 0) if forwards else (0, count)
        rows = emit.call(zeco.halo.default, current(holder), dim, before, after, 0.0, ranks.group)
        length = emit.call(aten.sym_size.int, current(holder), dim)
        rows = emit.call(aten.narrow.default, rows, dim, 0 if forwards else count, length)
        emit.call(aten.copy_.default, user_node.args[0], rows)
        user_node.graph.erase_node(user_node)

    sent = halo_exchanges(analysis, base, dim, *((count, 0) if forwards else (0, count)))
    return Plan("halo exchange", f"shift by {count} row(s), written into zeros", apply, sent)


_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
