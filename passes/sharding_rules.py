"""Rules for ops that mix positions and can be made right: what each does about it.

`plan(analysis, user_node)` returns what would make the node's results those of the unsharded model, or None if no
rule applies; nothing is changed until the plan is applied. A rule is tried on a user node none of whose inputs
is MIXED; it looks at what the node's ATen ops do along the sequence.

    reduction over the sequence      sum over the group (for a mean: divided by its size)
    cross entropy, shifted or not    global sum over global count
    convolution, padding, shift      the neighbour's rows (halo)
    arange                           the rank's offset
    rows of a table by position      the rank's rows
    first or last token              from the rank that has it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State
from zeco_compile.passes.region import Sizes
from zeco_compile.passes.schema import argument, operand, operands

aten = torch.ops.aten
zeco = torch.ops.zeco


@dataclass(frozen=True)
class Ranks:
    """The group that shares the sequence, and this rank's place in it."""

    group: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Plan:
    """`apply(ranks)` rewrites the user's graph; `decision`, `detail` and `exchanges` go into the report.

    `exchanges` are (direction, bytes that a rank sends in the forward).
    """

    decision: str
    detail: str
    apply: Callable[[Ranks], None]
    exchanges: tuple[tuple[str, int], ...] = ()
    covers: tuple[fx.Node, ...] = ()
    """Other nodes of the user's graph that the plan replaces as well."""


def plan(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """The first rule that applies to a node whose inputs are LOCAL or WINDOW."""
    for rule in _RULES:
        found = rule(analysis, user_node)
        if found is not None:
            return found
    return None


# --------------------------------------------------------------------------------------------------- small tools


class Emit:
    """Adds nodes to the user's graph at one place, with the source line of the node they stand for."""

    def __init__(self, user_node: fx.Node, *, after: bool) -> None:
        self.user_node, self.graph, self.after = user_node, user_node.graph, after
        self.last = user_node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        place = (
            self.graph.inserting_after(self.last)
            if self.after
            else self.graph.inserting_before(self.user_node)
        )
        with place:
            node = self.graph.call_function(target, args, kwargs)
        if "stack_trace" in self.user_node.meta:
            node.meta["stack_trace"] = self.user_node.meta["stack_trace"]
        node.meta["zeco_settled"] = True
        if self.after:
            self.last = node
        return node


def settled(user_node: fx.Node) -> bool:
    """The node was rewritten, or made by a rewrite: what it does along the sequence is intended."""
    return bool(user_node.meta.get("zeco_settled"))


def settle(user_node: fx.Node) -> None:
    user_node.meta["zeco_settled"] = True


def _given(user_node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return dict(zip(names, user_node.args, strict=False)) | dict(user_node.kwargs)


def _mixing(analysis: Analysis, user_node: fx.Node) -> list[fx.Node]:
    return [n for n in analysis.shadow.groups.get(user_node, []) if analysis.mixes(n)]


def _kinds(analysis: Analysis, node: fx.Node) -> set[str]:
    return {action.kind for action in analysis.own_mixing(node)}


def _single_output(analysis: Analysis, user_node: fx.Node) -> fx.Node | None:
    made = analysis.shadow.value.get(user_node)
    return made if isinstance(made, fx.Node) else None


_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.clone.default,
    aten.expand.default, aten.t.default, aten._to_copy.default, aten.alias.default, aten.detach.default,
)  # fmt: skip


def _bytes(analysis: Analysis, value: fx.Node, along: int | None = None, rows: int = 1) -> int:
    """Bytes of a value, or of some of its rows along the sequence, at the sizes of this call."""
    at = Sizes(analysis, analysis.real_length)
    count = value.meta["val"].dtype.itemsize
    for i, dim in enumerate(analysis.track.dims(value)):
        count *= rows if i == along else at.of_dim(dim)
    return int(count)


def _halo_exchanges(
    analysis: Analysis, value: fx.Node, dim: int, left: int, right: int
) -> tuple[tuple[str, int], ...]:
    sent = (("to the next rank", left), ("to the previous rank", right))
    return tuple((way, _bytes(analysis, value, dim, rows)) for way, rows in sent if rows > 0)


def _through_views(node: fx.Node) -> fx.Node:
    """Where a value came from before views and copies."""
    while node.target in _VIEWS:
        node = operand(node, 0)
    return node


def _is_local(analysis: Analysis, node: fx.Node) -> bool:
    return analysis.state(node) is State.LOCAL


def _row_dim(analysis: Analysis, node: fx.Node) -> int | None:
    """The dimension along the sequence, if it is one of rows alone (no other axis folded into it)."""
    dims = analysis.track.sequence_dims(node)
    if len(dims) != 1:
        return None
    return dims[0] if len(analysis.track.axes.flat(analysis.track.dims(node)[dims[0]])) == 1 else None


def _window(analysis: Analysis, node: fx.Node) -> tuple[Any, Any] | None:
    dim = _row_dim(analysis, node)
    if dim is None:
        return None
    return analysis.track.axes.flat(analysis.track.dims(node)[dim])[0].window


def _replace_value(user_node: fx.Node, new: fx.Node, keep: Sequence[fx.Node]) -> None:
    """Readers of `user_node` read `new`, but for the nodes that compute it."""
    user_node.meta["zeco_replaced_by"] = new
    user_node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in keep and user is not new)


def _substitute(user_node: fx.Node, new: fx.Node) -> None:
    """`new` instead of `user_node`, which goes."""
    user_node.meta["zeco_replaced_by"] = new
    user_node.replace_all_uses_with(new)
    user_node.graph.erase_node(user_node)


def _current(user_node: fx.Node) -> fx.Node:
    """What stands for a node that an earlier plan has replaced."""
    while "zeco_replaced_by" in user_node.meta:
        user_node = user_node.meta["zeco_replaced_by"]
    return user_node


# ------------------------------------------------------------------------------------------- reductions over all


_SUMS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default,
    aten.mean.default, aten.mean.dim, aten.mse_loss.default, aten.l1_loss.default,
)  # fmt: skip
_MEANS = (aten.mean.default, aten.mean.dim)


def _reduction(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = _mixing(analysis, user_node)
    output = _single_output(analysis, user_node)
    if len(mixing) != 1 or output is None or analysis.is_window(mixing[0]):
        return None
    (node,) = mixing
    if node.target not in _SUMS or not _kinds(analysis, node) <= {"reduce", "contract"}:
        return None
    if any(
        not _is_local(analysis, s)
        for s in node.all_input_nodes
        if isinstance(s.meta.get("val"), torch.Tensor)
    ):
        return None
    if _through_views(output) is not node or analysis.track.sequence_dims(output):
        return None
    mean = node.target in _MEANS
    if node.target in (aten.mse_loss.default, aten.l1_loss.default):
        mean = argument(node, "reduction", 1) == 1

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        total = emit.call(zeco.all_sum.default, user_node, ranks.group)
        keep = [total]
        if mean:
            total = emit.call(aten.div.Tensor, total, ranks.world_size)
            keep.append(total)
        _replace_value(user_node, total, keep)
        settle(user_node)

    what = "mean of the ranks' means" if mean else "sum of the ranks' sums"
    return Plan(
        "all-reduce",
        f"{node.target.overloadpacket.__name__} over the sequence: {what}",
        apply,
        (("among all ranks", _bytes(analysis, output)),),
    )


# ------------------------------------------------------------------------------------------------- cross entropy


def _cross_entropy(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    if user_node.target is not torch.nn.functional.cross_entropy:
        return None
    given = _given(user_node, _CE_NAMES)
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None or reduction == "none":
        return None
    logits, labels = given["input"], given["target"]
    logits_value = analysis.shadow.reads.get((user_node, logits))
    labels_value = analysis.shadow.reads.get((user_node, labels))
    if not isinstance(logits_value, fx.Node) or not isinstance(labels_value, fx.Node):
        return None
    if labels_value.meta["val"].dtype.is_floating_point:
        return None
    shift = None
    if not (_is_local(analysis, logits_value) and _is_local(analysis, labels_value)):
        shift = _shift_of(analysis, logits_value, labels_value)
        if shift is None:
            return None
    if not analysis.track.sequence_dims(logits_value) and not analysis.track.sequence_dims(labels_value):
        return None
    ignored = given.get("ignore_index", -100)

    def apply(ranks: Ranks) -> None:
        before = Emit(user_node, after=False)
        given = _given(user_node, _CE_NAMES)
        source, target, weight = given["input"], given["target"], given.get("weight")
        if shift is not None:
            source, target = shift.emit(before, ranks, ignored)
        arguments = {k: v for k, v in given.items() if k not in ("input", "target", "reduction")}
        local = before.call(torch.nn.functional.cross_entropy, source, target, **arguments, reduction="sum")
        total = before.call(zeco.all_sum.default, local, ranks.group)
        if reduction == "mean":
            counted = before.call(torch.ne, target, ignored)
            if weight is None:
                count = before.call(torch.sum, counted)
            else:
                known = before.call(torch.where, counted, target, 0)
                count = before.call(
                    torch.sum, before.call(torch.mul, before.call(torch.take, weight, known), counted)
                )
            total = before.call(torch.div, total, before.call(zeco.all_sum.default, count, ranks.group))
        _substitute(user_node, total)

    detail = "global sum over the global count of labels" if reduction == "mean" else "sum over all ranks"
    if shift is not None:
        detail += f"; labels shifted by {shift.by} across the ranks' borders"
    exchanges = [("among all ranks", 8 if reduction == "mean" else 4)]
    if shift is not None:
        base = shift.labels[0]
        exchanges.append(("to the previous rank", _bytes(analysis, base, _row_dim(analysis, base), shift.by)))
    return Plan("all-reduce", detail, apply, tuple(exchanges))


_CE_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


@dataclass(frozen=True)
class _Shift:
    """Logits without their last `by` rows against labels without their first `by`."""

    by: int
    logits: tuple[fx.Node, list[fx.Node], fx.Node]
    labels: tuple[fx.Node, list[fx.Node], fx.Node]
    analysis: Analysis

    def emit(self, emit: Emit, ranks: Ranks, ignored: int) -> tuple[fx.Node, fx.Node]:
        """All rows of the logits, and for each its label: the next rank's first ones at the border, the ignored
        label where there is no next."""
        _, path, holder = self.logits
        logits = _replay(emit, self.analysis, _current(holder), path)
        base, path, holder = self.labels
        dim = _row_dim(self.analysis, base)
        rows = emit.call(zeco.halo.default, _current(holder), dim, 0, self.by, float(ignored), ranks.group)
        rows = emit.call(aten.slice.Tensor, rows, dim, self.by)
        return logits, _replay(emit, self.analysis, rows, path)


def _shift_of(analysis: Analysis, logits: fx.Node, labels: fx.Node) -> _Shift | None:
    a, b = _path_to_base(analysis, logits), _path_to_base(analysis, labels)
    if a is None or b is None:
        return None
    (a_base, a_path, (a_left, a_right)), (b_base, b_path, (b_left, b_right)) = a, b
    by = -b_left if isinstance(b_left, int) else 0
    if by < 1 or (a_left, a_right) != (0, -by) or b_right != 0:
        return None
    holders = [holder_of(analysis, base) for base in (a_base, b_base)]
    if holders[0] is None or holders[1] is None or _row_dim(analysis, b_base) is None:
        return None
    return _Shift(by, (a_base, a_path, holders[0]), (b_base, b_path, holders[1]), analysis)


_POINTWISE_PATH = (aten.mul.Scalar, aten.div.Scalar)


def _path_to_base(analysis: Analysis, node: fx.Node) -> tuple[fx.Node, list[fx.Node], tuple[Any, Any]] | None:
    """Back through views and slices of rows to a LOCAL value: (base, the views on the way, the window)."""
    path: list[fx.Node] = []
    window: tuple[Any, Any] | None = None
    while analysis.state(node) is State.WINDOW:
        if node.target is aten.slice.Tensor:
            if window is None:
                window = _window(analysis, node)
        elif node.target in _VIEWS:
            path.append(node)
        else:
            return None
        node = operand(node, 0)
    if window is None or analysis.state(node) is not State.LOCAL:
        return None
    return node, path[::-1], window


def _replay(emit: Emit, analysis: Analysis, source: fx.Node, path: list[fx.Node]) -> fx.Node:
    """The views of `path` on a value that has all rows where the path's had a window of them."""
    x = source
    for node in path:
        if node.target in (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.expand.default,
        ):
            sizes = [
                -1 if analysis.track.axes.is_sequence(dim) else size
                for dim, size in zip(analysis.track.dims(node), node.meta["val"].shape, strict=True)
            ]
            x = emit.call(aten.reshape.default, x, [s if isinstance(s, int) else -1 for s in sizes])
        else:
            x = emit.call(node.target, x, *node.args[1:], **node.kwargs)
    return x


def holder_of(analysis: Analysis, value: fx.Node) -> fx.Node | None:
    """A node of the user's graph that returned this value (and still has it: nothing wrote into it)."""
    for user_node, made in analysis.shadow.value.items():
        if made is value:
            later = [read for (_, argument_), read in analysis.shadow.reads.items() if argument_ is user_node]
            if all(read is value for read in later):
                return user_node
    return None


# ------------------------------------------------------------------------------------------------ neighbours' rows


def _convolution(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    if user_node.target not in (torch.conv1d, torch.conv2d, torch.conv3d, *_CONV_FUNCTIONS):
        return None
    mixing = [n for n in _mixing(analysis, user_node) if n.target is aten.convolution.default]
    if len(mixing) != 1 or len(_mixing(analysis, user_node)) != 1:
        return None
    (node,) = mixing
    source = operand(node, 0)
    dim = _row_dim(analysis, source)
    result = _single_output(analysis, user_node)
    if result is None or dim is None or dim < 2 or argument(node, "transposed"):
        return None
    spatial = dim - 2
    one = {name: argument(node, name) for name in ("stride", "padding", "dilation")}
    stride, padding, dilation = (v[spatial if len(v) > 1 else 0] for v in one.values())
    if stride != 1 or analysis.state(source) is State.MIXED:
        return None
    reach = (operand(node, 1).meta["val"].shape[2 + spatial] - 1) * dilation
    if _kinds(analysis, node) - {"convolve", "window"}:
        return None
    crop_right = padding > 0 and _cropped_right(analysis, node, padding)

    def apply(ranks: Ranks) -> None:
        given = _given(user_node, _CONV_NAMES)
        if padding:
            emit = Emit(user_node, after=False)
            right = 0 if crop_right else padding
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
        _halo_exchanges(analysis, source, dim, padding, 0 if crop_right else padding),
    )


_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_FUNCTIONS = tuple(
    getattr(torch.nn.functional, name)
    for name in ("conv1d", "conv2d", "conv3d")
    if hasattr(torch.nn.functional, name)
)


def _cropped_right(analysis: Analysis, node: fx.Node, amount: int) -> bool:
    """Everybody who reads the convolution first cuts its last `amount` rows off."""
    own = _window(analysis, node)
    if own is None:
        return False
    for user in node.users:
        if user.target is not aten.slice.Tensor:
            return False
        window = _window(analysis, user)
        if window is None or not isinstance(window[1], int) or not isinstance(own[1], int):
            return False
        if window[1] > own[1] - amount:
            return False
    return bool(node.users)


def _padding(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = _mixing(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.constant_pad_nd.default:
        return None
    (node,) = mixing
    source = operand(node, 0)
    result = _single_output(analysis, user_node)
    dim = _row_dim(analysis, source)
    if result is not node or dim is None or analysis.state(source) is State.MIXED:
        return None
    amounts = list(argument(node, "pad"))
    place = 2 * (source.meta["val"].dim() - 1 - dim)
    left, right = amounts[place : place + 2]
    if not (isinstance(left, int) and isinstance(right, int)):
        return None
    base, base_window = source, (0, 0)
    if analysis.state(source) is State.WINDOW:
        found = _path_to_base(analysis, source)
        if found is None or found[1]:
            return None
        base, _, base_window = found
    before, after = base_window
    if not (isinstance(before, int) and isinstance(after, int)):
        return None
    if (left > 0 and before < 0) or (right > 0 and after < 0):
        return None  # rows cut off and put back as padding: the ends of the whole sequence are blanked
    holder = holder_of(analysis, base)
    if holder is None:
        return None
    fill = argument(node, "value", 0)
    fill = 0.0 if fill is None else float(fill)
    window = (before + left, after + right)

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        rows = emit.call(
            zeco.halo.default, _current(holder), dim, max(window[0], 0), max(window[1], 0), fill, ranks.group
        )
        rest = list(amounts)
        rest[place : place + 2] = [min(window[0], 0), min(window[1], 0)]
        if any(rest):
            rows = emit.call(aten.constant_pad_nd.default, rows, rest, fill)
        _substitute(user_node, rows)

    return Plan(
        "halo exchange", f"padding: {max(window[0], 0)} rows before, {max(window[1], 0)} after", apply
    )


def _concatenation(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`cat([first, x[:, :-n]])`, and its mirror: x shifted by n rows, with something else at the start."""
    mixing = _mixing(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.cat.default:
        return None
    (node,) = mixing
    parts = operands(node)
    dim = _row_dim(analysis, node)
    if len(parts) != 2 or dim is None or _single_output(analysis, user_node) is not node:
        return None
    if any(analysis.state(p) is State.MIXED for p in parts):
        return None
    user_parts = user_node.args[0] if user_node.args else user_node.kwargs.get("tensors")
    if not isinstance(user_parts, list | tuple) or len(user_parts) != 2:
        return None
    for edge, body in ((0, 1), (1, 0)):
        found = _path_to_base(analysis, parts[body])
        if found is None or found[1]:
            continue
        base, _, window = found
        count = parts[edge].meta["val"].shape[dim]
        if not isinstance(count, int) or window != ((0, -count) if edge == 0 else (-count, 0)):
            continue
        holder = holder_of(analysis, base)
        if holder is None:
            continue
        return Plan(
            "halo exchange",
            f"shift by {count} row(s)",
            _shifted(user_node, edge, dim, count, holder),
            _halo_exchanges(analysis, base, dim, *((count, 0) if edge == 0 else (0, count))),
        )
    return None


def _shifted(user_node: fx.Node, edge: int, dim: int, count: int, holder: fx.Node) -> Callable[[Ranks], None]:
    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        parts: Any = user_node.args[0] if user_node.args else user_node.kwargs["tensors"]
        left, right = (count, 0) if edge == 0 else (0, count)
        rows = emit.call(zeco.halo.default, _current(holder), dim, left, right, 0.0, ranks.group)
        start = 0 if edge == 0 else -count
        end = count if edge == 0 else 2**63 - 1
        neighbour = emit.call(aten.slice.Tensor, rows, dim, start, end)
        end_of_sequence = 0 if edge == 0 else ranks.world_size - 1
        mine = emit.call(zeco.at_rank.default, neighbour, end_of_sequence, ranks.group)
        chosen = emit.call(torch.where, mine, parts[edge], neighbour)
        joined = [chosen, parts[1]] if edge == 0 else [parts[0], chosen]
        new = emit.call(torch.cat, joined, dim)
        _substitute(user_node, new)

    return apply


# ------------------------------------------------------------------------------------------------------ positions


def _positions(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    mixing = _mixing(analysis, user_node)
    ranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)
    if len(mixing) != 1 or mixing[0].target not in ranges or user_node.target is not torch.arange:
        return None
    (node,) = mixing
    if _single_output(analysis, user_node) is not node or not analysis.track.axes.is_whole_sequence(
        analysis.track.dims(node)[0]
    ):
        return None
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    if not isinstance(step, int | float):
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        length = emit.call(aten.sym_size.int, user_node, 0)
        offset = emit.call(operator.mul, length, ranks.rank * step)
        new = emit.call(aten.add.Tensor, user_node, offset)
        _replace_value(user_node, new, [length, new])
        settle(user_node)

    return Plan("offset", "positions start at the rank's first token", apply)


def _table_rows(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`table[:T]`, rows of something that every rank holds, read as one row per position."""
    lookups = _mixing(analysis, user_node)
    if len(lookups) != 1 or not analysis.is_table_lookup(lookups[0]):
        return None
    (node,) = lookups
    table = operand(node, 0)
    if analysis.length == 1:
        return None  # table[:T] and table[:1] look alike, and mean different rows
    if user_node.target is not operator.getitem or not isinstance(user_node.args[0], fx.Node):
        return None
    if analysis.shadow.reads.get((user_node, user_node.args[0])) is not table:
        return None
    dim = argument(node, "dim", 0) % table.meta["val"].dim()
    if argument(node, "start", 0) not in (0, None) or argument(node, "step", 1) != 1:
        return None

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=False)
        source = operand(user_node, 0)
        length = emit.call(aten.sym_size.int, *_length_source(analysis))
        offset = emit.call(operator.mul, length, ranks.rank)
        # narrow, unlike a slice, raises where the table has too few rows for the whole sequence
        mine = emit.call(aten.narrow.default, source, dim, offset, length)
        user_node.replace_input_with(source, mine)
        settle(user_node)

    return Plan("offset", "rows of a table, from the rank's first position on", apply)


def _length_source(analysis: Analysis) -> tuple[fx.Node, int]:
    for each in analysis.inputs:
        if each.along is not None:
            return each.node, each.along
    raise AssertionError("an analysis has an input along the sequence")


# ------------------------------------------------------------------------------------------------ single positions


def _single_token(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    """`x[:, 0]` and `x[:, -1]`: any other number may be a step of a loop over the slice."""
    mixing = _mixing(analysis, user_node)
    if len(mixing) != 1 or mixing[0].target is not aten.select.int:
        return None
    (node,) = mixing
    output = _single_output(analysis, user_node)
    if (
        output is None
        or not _is_local(analysis, operand(node, 0))
        or _row_dim(analysis, operand(node, 0)) is None
    ):
        return None
    if analysis.length == 1 or argument(node, "index") not in (0, -1):
        return None
    first = argument(node, "index") == 0

    def apply(ranks: Ranks) -> None:
        emit = Emit(user_node, after=True)
        owner = 0 if first else ranks.world_size - 1
        new = emit.call(zeco.from_rank.default, user_node, owner, ranks.group)
        _replace_value(user_node, new, [new])
        settle(user_node)

    return Plan(
        "from owner",
        f"the {'first' if first else 'last'} token, from the rank that has it",
        apply,
        (("among all ranks", _bytes(analysis, output)),),
    )


_RULES: tuple[Callable[[Analysis, fx.Node], Plan | None], ...] = (
    _reduction,
    _cross_entropy,
    _convolution,
    _padding,
    _concatenation,
    _positions,
    _table_rows,
    _single_token,
)
