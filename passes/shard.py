"""Makes every op outside of the recognised regions right on slices, or refuses it with the user's line.

Contract: after this pass every value of the graph is, on each rank, the slice of the unsharded model's value (or
equal to it). An op that mixes positions is rewritten by a rule of `sharding_rules`; one that no rule knows is an
`UnsupportedOp`, or, with `gather`, computed on the whole sequence on every rank (gather.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis, State, assign_states
from zeco_compile.passes.cumulative import cumulative
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.flips import cumulative_backwards
from zeco_compile.passes.gathered_keys import over_all_keys
from zeco_compile.passes.locations import expression, user_location
from zeco_compile.passes.losses import over_windows
from zeco_compile.passes.neighbours import rows_in_front
from zeco_compile.passes.plans import Plan, Ranks, settled
from zeco_compile.passes.report import Communication, Decision, Report, op_name, user_op_name
from zeco_compile.passes.schema import argument, following, operand
from zeco_compile.passes.sharding_rules import plan
from zeco_compile.passes.sorted_rows import departure
from zeco_compile.passes.transitions import peculiarity

aten = torch.ops.aten

Fallback = Callable[[Analysis, fx.Node], Plan | None]


def will_be_handled(analysis: Analysis) -> Callable[[fx.Node], bool]:
    """Whether `shard` will make a node right: what recognition may take as given.

    With a constant length a single token is left out: a loop over the sequence consists of such reads.
    """
    loops = isinstance(analysis.length, int)

    def handled(user_node: fx.Node) -> bool:
        if settled(user_node):
            return True
        found = plan(analysis, user_node)
        return found is not None and not (loops and found.decision in ("from owner", "at owner"))

    return handled


def will_be_carried(analysis: Analysis) -> Callable[[fx.Node], bool]:
    """Whether `shard` will make a node right that cumulates along the sequence, or ends what does so backwards, or puts
    rows in front of it.

    It may be a part of something larger, a cumulative sum of a gate above all: not to be asked before that is found.
    """
    return lambda user_node: (
        _carried(analysis, user_node) is not None or cumulative_backwards(analysis, user_node) is not None
    )


def _carried(analysis: Analysis, user_node: fx.Node) -> Plan | None:
    return cumulative(analysis, user_node) or rows_in_front(analysis, user_node)


def shard(
    analysis: Analysis,
    ranks: Ranks,
    report: Report,
    *,
    attempts: Sequence[tuple[fx.Node, str]] = (),
    fallback: Fallback | None = None,
) -> int:
    """Rewrites the graph of `analysis` and returns at how many places. `attempts` are what recognition tried, and
    `fallback` is what an option would do about it, for the message of a refusal. Raises UnsupportedOp before anything
    is changed."""
    plans: dict[fx.Node, Plan] = {}

    def handled(user_node: fx.Node) -> bool:
        if settled(user_node):
            return True
        found = plan(analysis, user_node) or _carried(analysis, user_node)
        if found is not None:
            plans[user_node] = found
        return found is not None

    def fall_back(user_node: fx.Node) -> bool:
        found = (
            over_windows(analysis, user_node)
            or over_all_keys(analysis, user_node)
            or cumulative_backwards(analysis, user_node)
        )
        if found is not None:
            plans[user_node] = found
        return found is not None

    assign_states(analysis, handled, fall_back)
    refuse_mixed(analysis, attempts, {node for found in plans.values() for node in found.covers}, fallback)
    for user_node, found in plans.items():
        _note(report, user_node, found)
    for found in plans.values():
        found.apply(ranks)
    replaced = {node for found in plans.values() for node in found.covers}
    for node in reversed(list(analysis.gm.graph.nodes)):
        idle = _does_nothing(analysis, node) and not replaced.isdisjoint(node.all_input_nodes)
        if (node in replaced or idle) and not node.users:
            analysis.gm.graph.erase_node(node)
    return len(plans)


def _does_nothing(analysis: Analysis, user_node: fx.Node) -> bool:
    """Dynamo keeps calls whose results nobody reads: `mask.to(device)`, which is `mask`."""
    shadow, calls = analysis.shadow, user_node.op in ("call_function", "call_method")
    return calls and user_node not in shadow.writes and not shadow.groups.get(user_node)


def gather_one(analysis: Analysis, ranks: Ranks, report: Report, fallback: Fallback) -> bool:
    """Makes the first node right that only `fallback` can make right; False if there is none. What follows it has to
    be analysed anew: the axes of its result are known only once it is there."""
    found = _gathered(analysis, fallback, bool)
    for user_node, gathered in found:
        _note(report, user_node, gathered)
        gathered.apply(ranks)
    return bool(found)


def _gathered(
    analysis: Analysis, fallback: Fallback, enough: Callable[[list[tuple[fx.Node, Plan]]], bool]
) -> list[tuple[fx.Node, Plan]]:
    """The nodes that only `fallback` can make right, as long as those found are not `enough`."""
    found: list[tuple[fx.Node, Plan]] = []

    def handled(user_node: fx.Node) -> bool:
        known = settled(user_node) or plan(analysis, user_node) is not None
        return known or _carried(analysis, user_node) is not None

    def settle(user_node: fx.Node) -> bool:
        if enough(found) or over_windows(analysis, user_node) or over_all_keys(analysis, user_node):
            return True
        gathered = fallback(analysis, user_node)
        if gathered is not None:
            found.append((user_node, gathered))
        return gathered is not None

    assign_states(analysis, handled, settle)
    return found


def _note(report: Report, user_node: fx.Node, found: Plan) -> None:
    report.decisions.append(
        Decision(str(user_node), op_name(user_node), found.decision, user_location(user_node), found.detail)
    )
    report.communication += [
        Communication(f"{found.decision} of {user_node}", way, "", sent, 2) for way, sent in found.exchanges
    ]


def refuse_mixed(
    analysis: Analysis,
    attempts: Sequence[tuple[fx.Node, str]] = (),
    replaced: Collection[fx.Node] = (),
    fallback: Fallback | None = None,
) -> None:
    """Raises UnsupportedOp for the first node of the user's graph whose result is not what it should be.

    Nodes in `replaced` will be gone. The message says so where `fallback` would make the node right.
    """
    found: list[tuple[fx.Node, fx.Node]] = []
    for user_node in analysis.gm.graph.nodes:
        if user_node in replaced:
            continue
        group = analysis.shadow.groups.get(user_node, [])
        guilty = [n for n in group if analysis.state(n) is State.MIXED and analysis.mixes(n)]
        if guilty:
            found.append((user_node, guilty[0]))
    if not found:
        return
    # A mask made from sizes alone is harmless where what it is for is: the first op on the user's values says more.
    user_node, node = next((each for each in found if not analysis.is_constant(each[1])), found[0])
    if (peculiar := peculiarity(analysis, node)) is not None or not _may_be_attention(analysis, node):
        attempts = ()  # why it is not linear attention is said, or plain
    why, hints = _why(analysis, node, user_node, attempts), _hints(analysis, user_node, attempts)
    hints += _constants_cut_beside(analysis, node)
    why = why if peculiar is None else f"{why} {peculiar}"
    gathers = fallback is not None and _would_be_gathered(analysis, user_node, fallback)
    if not gathers:
        hints.append(
            "compile what is before and after it, and compute it on the whole sequence in between "
            "(zeco_compile.gather_sequence, shard_sequence)"
        )
    raise UnsupportedOp(
        user_op_name(user_node),
        location=user_location(user_node),
        why=why,
        hints=hints,
        node=str(user_node),
        gather=gathers,
    )


def _would_be_gathered(analysis: Analysis, user_node: fx.Node, fallback: Fallback) -> bool:
    """Whether `gather_one` would come to a region that has this node. Assigns states anew."""
    found = _gathered(analysis, fallback, lambda regions: False)
    return any(at is user_node or user_node in region.covers for at, region in found)


def _why(
    analysis: Analysis, node: fx.Node, user_node: fx.Node, attempts: Sequence[tuple[fx.Node, str]]
) -> str:
    kinds = {action.kind for action in analysis.own_mixing(node)}
    operation = node.target if isinstance(node.target, torch._ops.OpOverload) else op_name(node)
    if node in analysis.track.problems:
        what = f"`{operation}` is {analysis.track.problems[node]}, along the sequence"
    elif analysis.is_pair(node) and not kinds:
        what = "its result has two axes along the sequence, a value for each pair of positions"
    elif analysis.is_misaligned(node):
        what = "it combines rows of the sequence with rows at other positions"
    elif analysis.is_table_lookup(node):
        what = "it reads rows by position from a tensor that is whole on every rank, in a way that is not followed"
    else:
        ways = ", ".join(sorted(kinds - {"along"}))
        what = f"it looks at other positions ({ways}{' ' if ways else ''}along the sequence: `{operation}`)"
        if "cat" in kinds:
            what += (
                "; rows put beside those of the sequence (learned tokens, registers) are of no rank's slice"
            )
    text = f"{what}, and no rule says how to compute it on a slice."
    if (departs := departure(analysis, node)) is not None:
        return f"{text} {departs}"
    if (attempt := _nearest(analysis, user_node, attempts)) is not None:
        end, reason = attempt
        ends = expression(end, op_name(end))
        text += f" It was not taken for linear attention either: what ends with {ends}: {reason}."
    return text


_READS = frozenset({"look-up", "rows", "scatter", "count", "group", "convolve", "squeeze"})


def _may_be_attention(analysis: Analysis, node: fx.Node) -> bool:
    """Rows that are read or written by their numbers, and a table's, are no part of any attention."""
    kinds = {action.kind for action in analysis.own_mixing(node)}
    return not analysis.is_table_lookup(node) and not (kinds and kinds <= _READS)


def _nearest(
    analysis: Analysis, user_node: fx.Node, attempts: Sequence[tuple[fx.Node, str]]
) -> tuple[fx.Node, str] | None:
    """The first attempt that ends at this node or later."""
    order = {node: i for i, node in enumerate(analysis.gm.graph.nodes)}
    later = [a for a in attempts if order.get(a[0], -1) >= order[user_node]]
    return later[0] if later else None


def _hints(analysis: Analysis, user_node: fx.Node, attempts: Sequence[tuple[fx.Node, str]]) -> list[str]:
    hints = []
    if _nearest(analysis, user_node, attempts) is not None:
        hints.append(
            "if this is gated linear attention, call zeco_compile.gated_linear_attention(q, k, v, g) in its place"
        )
    if (padding := _padding_before(analysis, user_node)) is not None:
        hints.append(
            f"the sequence is padded at {user_location(padding)}: project and gate the tokens alone, pad q, k, v "
            "and the log decay (by zeros) where they are taken apart into chunks, and cut the result, [:, :T], where "
            "the chunks are put together; give each rank more than one chunk"
        )
    if user_node.target in (torch.linspace, torch.logspace):
        hints.append(
            "its number of steps is a constant of the trace: write it as start + torch.arange(T) * "
            "((end - start) / (T - 1)), with T = x.shape[1]"
        )
    graph = analysis.gm.graph
    if any(graph.find_nodes(op="call_function", target=target) for target in _FAST_PATHS):
        hints.append(
            "PyTorch has taken its fast path for inference, which is one op for a whole layer: call "
            "torch.backends.mha.set_fastpath_enabled(False), or leave gradients enabled"
        )
    return hints


def _constants_cut_beside(analysis: Analysis, node: fx.Node) -> list[str]:
    """With a constant length, rows cut out of numbers that the code makes, `w[1:]` of `w = torch.arange(T)`, are not
    known as rows of the sequence. Where they meet what is computed of the node, that is why no rule takes it."""
    if not isinstance(analysis.length, int):
        return []
    ahead = following([node])
    for cut in analysis.shadow.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        source, user_node = operand(cut, 0), analysis.user_node(cut)
        if user_node is None or not analysis.is_constant(cut) or ahead.isdisjoint(following([cut])):
            continue
        rows = source.meta["val"].shape[argument(cut, "dim", 0)]
        if rows == analysis.length and not analysis.track.sequence_dims(source):
            held = user_node.all_input_nodes[0] if user_node.all_input_nodes else user_node
            return [
                f"{expression(user_node, op_name(user_node))} takes rows of `{held}`, numbers that the code makes; "
                "where the trace holds for this length only, as beside a loop over it, these are not known to be one "
                "for each position: make them of a value that has the sequence, as "
                "torch.ones_like(x[0, :, 0]).cumsum(0) - 1 in place of torch.arange(T)"
            ]
    return []


_FAST_PATHS = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)


def _padding_before(analysis: Analysis, user_node: fx.Node) -> fx.Node | None:
    """The user's node that pads the sequence behind, if this one is computed from what it makes, or is it."""
    padding: dict[fx.Node, fx.Node] = {}
    for node in analysis.shadow.graph.nodes:
        pads = node.target is aten.constant_pad_nd.default and any(
            window is not None and window[0] == 0 and window[1] != 0
            for window in map(analysis.track.axes.window_of, analysis.track.dims(node))
        )
        own = analysis.user_node(node)
        from_padded = next((padding[source] for source in node.all_input_nodes if source in padding), None)
        if (found := own if pads else from_padded) is not None:
            padding[node] = found
            if own is user_node:
                return found
    return None
