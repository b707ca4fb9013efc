"""The shadow: the user's graph once more as functional ATen, for analysis only.

Dynamo's graph keeps what must survive (checkpointing, autocast, mutation, ``autograd.Function``) and is what gets
rewritten. But it holds a thousand spellings of the same thing, and in-place writes. So it is interpreted once
under functionalisation and traced into ATen, composite ops taken apart, without being used for anything but
reading. Every ATen node knows the node of the user's graph it came from, and every use of a value in the user's
graph knows which ATen node holds that value *at that time*: an in-place loop writes `out` many times, and each
reader means another version.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from zeco_compile.passes import torch_private
from zeco_compile.passes.schema import is_random, operand, shape
from zeco_compile.passes.sizes import same_size


@dataclass
class Shadow:
    """The ATen graph and its ties to the user's graph.

    ``origin``: ATen node -> node of the user's graph. ``inputs``: placeholder of the user's graph -> ATen
    placeholder. ``value``: node of the user's graph -> ATen node(s) of its result when it was made (a pytree
    with ATen nodes for tensors). ``reads``: (user node, argument node) -> the same for the value of the argument
    when the user ran. ``memory``: node of the user's graph -> the memory of its tensors, by a number that views
    share; ``writes``: node -> the memory that it wrote into. ``groups``: user node -> its ATen nodes, in order.
    ``rewritten``: ATen node -> node that has been put into the user's graph to compute its value.
    """

    graph: fx.Graph
    origin: dict[fx.Node, fx.Node]
    inputs: dict[fx.Node, fx.Node]
    value: dict[fx.Node, Any]
    reads: dict[tuple[fx.Node, fx.Node], Any]
    memory: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    groups: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    rewritten: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def tensors_read(self, user: fx.Node, argument: fx.Node) -> list[fx.Node]:
        """The ATen nodes of the tensors in `argument`, as `user` saw them."""
        return [
            leaf for leaf in pytree.tree_leaves(self.reads.get((user, argument))) if isinstance(leaf, fx.Node)
        ]

    def tensors_made(self, node: fx.Node) -> list[fx.Node]:
        """The ATen nodes of the tensors that `node` returned."""
        return [leaf for leaf in pytree.tree_leaves(self.value.get(node)) if isinstance(leaf, fx.Node)]

    def holders(self, order: Mapping[fx.Node, int], at: int) -> dict[fx.Node, fx.Node]:
        """Which node of the user's graph holds an ATen node's value right behind the node at position `at`.

        `order` has the positions; nodes that are not in it (made since) hold nothing. What was written to after it
        was seen last, under whatever name, is not known to hold anything.
        """
        latest: dict[fx.Node, Any] = {}
        unwritten_from: dict[fx.Node, int] = {}
        for user, made in self.value.items():
            if order.get(user, at + 1) <= at:
                latest[user], unwritten_from[user] = (
                    made,
                    order[user] + 1,
                )  # its own writes are in what it made
        for (user, argument), read in self.reads.items():
            if order.get(user, at + 1) <= at and unwritten_from.get(argument, 0) <= order[user]:
                latest[argument], unwritten_from[argument] = read, order[user]
        last_write: dict[int, int] = {}
        for user, written in self.writes.items():
            if order.get(user, at + 1) <= at:
                for key in written:
                    last_write[key] = max(last_write.get(key, -1), order[user])
        out: dict[fx.Node, fx.Node] = {}
        for holder, value in latest.items():
            touched = max((last_write.get(key, -1) for key in self.memory.get(holder, ())), default=-1)
            if isinstance(value, fx.Node) and touched < unwritten_from[holder]:
                out.setdefault(value, holder)
        return out

    def is_written_to(self, holder: fx.Node) -> bool:
        """Some node writes into its memory, under whatever name."""
        return any(not self.memory.get(holder, frozenset()).isdisjoint(each) for each in self.writes.values())


class _Recorder(fx.Interpreter):
    """Runs the user's graph under tracing and notes what each node reads and makes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.origin: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.made: dict[fx.Node, Any] = {}
        self.reads: dict[tuple[fx.Node, fx.Node], Any] = {}
        self.memory: dict[fx.Node, frozenset[int]] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.aten_graph: fx.Graph | None = None
        self._last: fx.Node | None = None  # of the nodes that were claimed
        self._alive: list[Any] = []  # so that no memory gets the number of another that is gone

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("placeholder", "get_attr"):
            self._note_reads(n)
        read = {argument: self.env[argument] for argument in n.all_input_nodes}
        result = super().run_node(n)
        written = [
            x for argument, x in read.items() if self._versions(x) != self._versions(self.reads[n, argument])
        ]
        if written:
            self.writes[n] = frozenset(key for x in written for key in torch_private.memory_of(x))
        self.made[n] = self._aten(result)
        self._claim_new_nodes(n)  # a view of what has been written to is made again
        self.memory[n] = frozenset(torch_private.memory_of(result))
        self._alive.append(result)
        if n.op == "placeholder" and isinstance(self.made[n], fx.Node):
            self.inputs[n] = self.made[n]
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _EINSUM and args and isinstance(args[0], str) and not kwargs:
            operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            return einsum_by_axes(args[0], list(operands))
        if target is torch.nn.functional.linear and not kwargs and _folds_ambiguously(args[:1]):
            product = einsum_by_axes("...i,oi->...o", list(args[:2]))
            return product if len(args) < 3 or args[2] is None else product + args[2]
        if target is torch.diff and (shifted := _difference_to_row_before(*args, **kwargs)) is not None:
            return shifted
        if target in _MATMUL and not kwargs and _folds_ambiguously(args):
            return einsum_by_axes("...ij,...jk->...ik", list(args))
        operator_ = torch.ops.zeco.gated_linear_attention
        if target in (operator_, operator_.default):  # Dynamo keeps the packet
            return _attention_by_its_parts(*args)
        if target is torch.ops.zeco.final_state_of.default:
            return _state_by_its_parts(*args)
        if target in (torch.ops.zeco.complex_recurrence, torch.ops.zeco.complex_recurrence.default):
            return _recurrence_by_its_parts(*args)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in ("matmul", "__matmul__"):
            return self.call_function(torch.matmul, args, kwargs)
        return super().call_method(target, args, kwargs)

    def _note_reads(self, n: fx.Node) -> None:
        for argument in n.all_input_nodes:
            self.reads[n, argument] = self._aten(self.env[argument])
        self._claim_new_nodes(n)  # syncing a view may have added nodes

    def _claim_new_nodes(self, n: fx.Node) -> None:
        graph = torch_private.tracing_graph()
        assert graph is not None, "the recorder runs only while a trace is being made"
        self.aten_graph = graph
        # from the end: the graph only grows, and is long
        fresh = list(itertools.takewhile(lambda node: node is not self._last, reversed(graph.nodes)))
        for node in reversed(fresh):
            if node.op != "placeholder":
                self.origin[node] = n
        self._last = fresh[0] if fresh else self._last

    def _versions(self, value: Any) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves(self._aten(value)) if isinstance(leaf, fx.Node)]

    def _aten(self, value: Any) -> Any:
        return pytree.tree_map(torch_private.traced_node, value)


def _attention_by_its_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and axes of the operator; its exchange between ranks is none of the analysis' business."""
    if g is not None and g.dim() == 1:
        g = g.expand(q.shape[0], q.shape[1], q.shape[2])
    o = torch.ops.zeco.diagonal(q, k, v, g, scale)
    if initial_state is not None:  # of no consequence for the axes, but what is not read is not kept
        o = torch.ops.zeco.combine(o, q, g, initial_state, scale)
    o = o.to(q.dtype)
    return o, _state_by_its_parts(k, v, g, initial_state) if output_final_state else q.new_empty((0,))


def _state_by_its_parts(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None, *_: Any
) -> torch.Tensor:
    if g is not None and g.dim() == 1:
        g = g.expand(k.shape[0], k.shape[1], k.shape[2])
    state: torch.Tensor = torch.ops.zeco.rank_state(k, v, g)[0]
    return state if initial_state is None else state + initial_state.to(state.dtype)


def _recurrence_by_its_parts(
    a: torch.Tensor, u: torch.Tensor, initial_state: torch.Tensor | None, output_final_state: bool, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    state_in = u.new_zeros([u.shape[0], *u.shape[2:]]) if initial_state is None else initial_state
    h = torch.ops.zeco.recurrence_states(a, u, state_in)
    return h, state_in + state_in if output_final_state else u.new_empty((0,))


_EINSUM = (torch.functional.einsum, torch.einsum)
_MATMUL = (torch.matmul, operator.matmul)


def _difference_to_row_before(
    x: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`torch.diff` with one row put in front, as x without x shifted by a row: PyTorch's own way has a row more on the
    way, and which rows of that are whose is not seen. None for other uses of it."""
    if n != 1 or prepend is None or append is not None or x.dtype is torch.bool:
        return None
    if prepend.dim() != x.dim() or prepend.dtype != x.dtype or prepend.shape[dim] != 1:
        return None
    return x - torch.cat([prepend, x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def _folds_ambiguously(operands: Sequence[torch.Tensor]) -> bool:
    """PyTorch folds the dimensions before the last into one and takes them apart again; among several of size one
    (one sequence, one token per rank) the sequence would be lost."""
    ones = [sum(isinstance(size, int) and size == 1 for size in each.shape[:-1]) for each in operands]
    return min(each.dim() for each in operands) > 1 and max(ones) > 1


def einsum_by_axes(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """`torch.einsum` as one broadcast product and one sum.

    PyTorch's own way depends on which sizes are one, and mixes those axes with others: with one token per rank the
    sequence would be lost. Nothing is computed here but axes, so the memory of the product does not matter.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    ellipsis = max(
        (t.dim() - len(s.replace("...", "")) for s, t in zip(terms, operands, strict=True)), default=0
    )
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation][:ellipsis]

    def spelled(term: str, dim: int | None) -> str:
        if "..." not in term:
            return term
        count = ellipsis if dim is None else dim - (len(term) - 3)
        return term.replace("...", "".join(spare[ellipsis - count :]))

    terms = [spelled(s, t.dim()) for s, t in zip(terms, operands, strict=True)]
    if arrow:
        out = spelled(right, None)
    else:
        letters = "".join(terms)
        out = "".join(spare) + "".join(sorted(c for c in set(letters) - set(spare) if letters.count(c) == 1))
    if any(len(set(term)) < len(term) for term in terms) or len(set(out)) < len(out):
        return torch.einsum(equation, *operands)  # a diagonal
    summed = [c for c in dict.fromkeys("".join(terms)) if c not in out]
    order = [*out, *summed]
    product = None
    for term, factor in zip(terms, operands, strict=True):
        x = factor.permute([term.index(c) for c in order if c in term])
        for position, letter in enumerate(order):
            if letter not in term:
                x = x.unsqueeze(position)
        product = x if product is None else product * x
    assert product is not None, "an einsum has operands"
    return product.sum(list(range(len(out), len(order)))) if summed else product


def build_shadow(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Shadow:
    """Traces `gm` into functional ATen on fake tensors. `gm` stays as it is."""
    fake_mode, fakes = torch_private.fake_inputs(gm, example_inputs)
    recorder = _Recorder(gm)
    with enable_python_dispatcher(), fake_mode, torch.no_grad():
        traced = torch_private.trace_functional(recorder.run, fakes)
    shadow = Shadow(
        traced.graph,
        recorder.origin,
        recorder.inputs,
        recorder.made,
        recorder.reads,
        recorder.memory,
        recorder.writes,
    )
    _simplify(shadow)
    for node in shadow.graph.nodes:
        if node in shadow.origin:
            shadow.groups.setdefault(shadow.origin[node], []).append(node)
    return shadow


def merge_alike(shadow: Shadow, whole: Collection[fx.Node]) -> None:
    """Values that are computed twice in the same way from inputs without a sequence (`whole`) become one.

    `gamma.exp()[:, None, None]` in the body of a loop is one decay and not one for each step.
    """
    known: dict[Any, fx.Node] = {}
    merged: dict[fx.Node, fx.Node] = {}
    computed = set(whole)
    for node in list(shadow.graph.nodes):
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or not computed.issuperset(sources):
            continue
        if is_random(node):
            continue
        computed.add(node)
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)  # so that what is computed from it is alike, too
            merged[node] = first
    for node in reversed(merged):
        shadow.graph.erase_node(node)
        if (user_node := shadow.origin.pop(node, None)) is not None:
            shadow.groups[user_node].remove(node)

    def current(leaf: Any) -> Any:
        return merged.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf

    for table in (shadow.value, shadow.reads):
        for key, tree in table.items():
            table[key] = pytree.tree_map(current, tree)  # type: ignore[index]


def _simplify(shadow: Shadow) -> None:
    """Drops what functionalisation leaves behind: `copy(destination, source)`, whose value is the source's, and what a
    write puts back into the shape of the memory, to be read from there in its own."""
    replaced: dict[fx.Node, fx.Node] = {}
    for node in shadow.graph.nodes:
        if node.target is torch.ops.aten.copy.default:
            destination, source = node.args[0], node.args[1]
            same_shape = destination.meta["val"].shape == source.meta["val"].shape
            same_dtype = destination.meta["val"].dtype == source.meta["val"].dtype
            if same_shape and same_dtype:
                node.replace_all_uses_with(source)
                replaced[node] = source
        elif node.target is _VIEW and (source := _put_back(shadow, node)) is not None:
            node.replace_all_uses_with(source)
            replaced[node] = source
    shadow.graph.eliminate_dead_code()
    alive = set(shadow.graph.nodes)

    def current(leaf: Any) -> Any:
        while isinstance(leaf, fx.Node) and leaf in replaced:
            leaf = replaced[leaf]
        return None if isinstance(leaf, fx.Node) and leaf not in alive else leaf

    for table in (shadow.value, shadow.reads):
        for key, tree in table.items():
            table[key] = pytree.tree_map(current, tree)  # type: ignore[index]
    for node in [node for node in shadow.origin if node not in alive]:
        del shadow.origin[node]


_VIEW = torch.ops.aten.view.default


def _put_back(shadow: Shadow, view: fx.Node) -> fx.Node | None:
    """What a view shows, if that is a value written in place, in its own shape."""
    folded = operand(view, 0)
    if folded.target is not _VIEW or shadow.origin.get(folded) not in shadow.writes:
        return None
    written = operand(folded, 0)
    alike = len(shape(view)) == len(shape(written)) and all(map(same_size, shape(view), shape(written)))
    return written if alike else None
