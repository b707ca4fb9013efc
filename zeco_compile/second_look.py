"""A second look at a model whose trace is one of this length: is it the same program for a longer sequence?

Dynamo traces the length as a symbol where it can, and then every number shows what it was computed from. It cannot
where the code loops over the length or takes `math.log` of it. Then a number in the graph
may be the length of the slice, a step may be special (`if t == 0`, `t % 64 == 0`), and nothing shows it. And a trace
with a symbol may have taken a way that the whole sequence would not have taken (`if T % chunk: pad`). So the
user's function is traced once more, on longer inputs, and both traces are compared: what differs depends on the
length in a way that is not known, and is refused. Masks and positions, which softmax attention needs for the whole
sequence, take their numbers from the second trace (`SecondLook.at_whole_length`, passes/rows_and_columns.py), and so
does what is computed of a sum over the sequence, `loss / T` (`take_numbers`).

Nothing is run: the inputs of the second trace are the given ones, repeated.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile import another_length, torch_private
from zeco_compile.comparison import compare_steps, refuse_rows_of_several, without_copies
from zeco_compile.passes.analysis import SHAPED_LIKE, Analysis
from zeco_compile.passes.end_rows import is_slice_of_rows, take_rows, takes_rows
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.passes.inputs import GraphInput, graph_inputs
from zeco_compile.passes.length import ARITHMETIC, BOUNDS, VALUES
from zeco_compile.passes.locations import Location, user_location
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.schema import argument, operand
from zeco_compile.passes.torch_private import (
    is_argument,
    is_autograd_function,
    source_name,
)

_MOST_NODES = 20_000
"""The second trace is of the whole sequence, unless a loop over it would have more nodes than this; of two slices
then."""


@dataclass(frozen=True)
class Step:
    """One op of a trace: what it is, the numbers it was given that are no sizes, the user's line, what it does along
    the sequence, and what it reads: steps by their places, inputs by their names."""

    op: str
    numbers: tuple[str, ...]
    location: Location
    along: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    node: fx.Node | None = field(default=None, compare=False, repr=False)
    user_node: fx.Node | None = field(default=None, compare=False, repr=False)
    is_constant: bool = field(default=False, compare=False)
    is_total: bool = field(default=False, compare=False)
    """Elementwise, on values from inputs that have no rows of the sequence."""

    def __str__(self) -> str:
        return f"{self.op}({', '.join(self.numbers)})" if self.numbers else self.op

    @property
    def what(self) -> tuple[Any, ...]:
        return self.op, self.numbers, self.along, self.reads


def steps_of(analysis: Analysis) -> list[Step]:
    """The ops of a graph that has been rewritten as far as it does not depend on the ranks."""
    names = {analysis.shadow.inputs.get(each.node): each.name for each in analysis.inputs}
    places: dict[fx.Node, str] = {node: name for node, name in names.items() if node is not None}
    out: list[Step] = []
    for node in analysis.shadow.graph.nodes:
        if node.op != "call_function" or not _is_value(node):
            continue  # a size, or an input
        if node.users and all(user.target in SHAPED_LIKE for user in node.users):
            continue  # read for its shape alone: zeros_like(x[:, :1])
        shaped_like = node.target in SHAPED_LIKE
        sources = [source for source in node.all_input_nodes if _is_value(source) and not shaped_like]
        reads = tuple(places.get(source, source.op) for source in sources)
        if not isinstance(node.target, torch._ops.OpOverload):
            places[node] = f"{node.args[1]} of {reads[0]}"  # one of several results
            continue
        places[node] = f"step {len(out)}"
        user_node = analysis.user_node(node)
        numbers, along = tuple(_numbers(analysis, node)), _along(analysis, node)
        constant = analysis.is_constant(node)
        total = torch.Tag.pointwise in node.target.tags and not constant and not _has_rows(analysis, node)
        out.append(
            Step(
                op_name(node),
                numbers,
                user_location(user_node),
                along,
                reads,
                node,
                user_node,
                constant,
                total,
            )
        )
    return [*out, *_backwards(analysis.gm)]


def _backwards(gm: fx.GraphModule) -> Iterator[Step]:
    """The steps of the backwards that the user wrote (`torch.autograd.Function`): the shadow has none of them."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and is_autograd_function(node.target):
            for body in node.all_input_nodes:
                graph = getattr(gm, str(body.target), None) if body.op == "get_attr" else None
                if isinstance(graph, fx.GraphModule):
                    for step in _user_steps(graph):
                        yield replace(step, location=user_location(node), reads=())


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _has_rows(analysis: Analysis, node: fx.Node) -> bool:
    return any(analysis.track.sequence_dims(each) for each in (node, *node.all_input_nodes))


def _take_numbers(step: Step, other: Step) -> bool:
    """Gives the node of the user's graph that made a step the numbers that another step was made with. False where
    these are not what makes the steps differ."""
    assert step.node is not None
    assert step.user_node is not None
    if other.node is None or other.user_node is None or step.user_node.target != other.user_node.target:
        return False
    wanted, given = _differing(step.node, other.node), _differing(step.user_node, other.user_node)
    if not wanted or not given or sorted(wanted.values()) != sorted(given.values()):
        return False
    leaves, spec = pytree.tree_flatten((step.user_node.args, step.user_node.kwargs))
    made = [given[i][1] if i in given else leaf for i, leaf in enumerate(leaves)]
    step.user_node.args, step.user_node.kwargs = pytree.tree_unflatten(made, spec)
    return True


def _differing(node: fx.Node, other: fx.Node) -> dict[int, tuple[int | float, int | float]] | None:
    """The numbers among the arguments of two nodes that are not the same, by their places; None where they differ by
    more."""
    own, spec = pytree.tree_flatten((node.args, node.kwargs))
    theirs, other_spec = pytree.tree_flatten((other.args, other.kwargs))
    if spec != other_spec:
        return None
    found = {}
    for place, pair in enumerate(zip(map(_number, own), map(_number, theirs), strict=True)):
        one, another = pair
        if one is None or another is None:
            tensors = isinstance(own[place], fx.Node) and isinstance(theirs[place], fx.Node)
            if one is not another or not (tensors or own[place] == theirs[place]):
                return None
        elif one != another:
            found[place] = one, another
    return found


def _number(value: Any) -> int | float | None:
    """A number, or that which a node of the graph stands for."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value", value.meta.get("val"))
        if isinstance(value, torch.SymInt | torch.SymFloat) and value.node.expr.is_number:
            value = int(value) if isinstance(value, torch.SymInt) else float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _along(analysis: Analysis, node: fx.Node) -> tuple[str, ...]:
    """How the op acts along the sequence, and which rows its result has: a slice takes all of a short sequence."""
    track = analysis.track
    if analysis.is_constant(node):
        return tuple(_elsewhere(analysis, node))  # `ones(T).sum()`; what is done to masks says nothing
    rows = [track.axes.window_of(track.dims(node)[dim]) for dim in track.sequence_dims(node)]
    kinds = (action.kind for action in track.acts_along_sequence(node))
    return (*kinds, *map(str, rows), *_elsewhere(analysis, node))


def _elsewhere(analysis: Analysis, node: fx.Node) -> Iterator[str]:
    """Sizes of dimensions that do not run along the sequence, and places in them."""
    value, along = node.meta.get("val"), analysis.track.sequence_dims(node)
    if isinstance(value, torch.Tensor):
        yield from (f"size {size}" for dim, size in enumerate(value.shape) if dim not in along)
    if node.target in (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor):
        source = operand(node, 0)
        dim = argument(node, "dim", 0) % source.meta["val"].dim()
        if dim not in analysis.track.sequence_dims(source):
            # of a table as many rows are taken as the sequence has, or they could not run along it
            count = 1 if analysis.is_table_lookup(node) else len(node.args)
            yield from (f"at {each}" for each in node.args[2:][:count])


def _user_steps(gm: fx.GraphModule) -> list[Step]:
    """The ops of Dynamo's own graph, with the numbers that are values: no sizes, dimensions and positions."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    own = [Step(op_name(n), tuple(_values(n)), user_location(n), reads=_inputs(n)) for n in calls]
    return [*own, *_backwards(gm)]


def _inputs(node: fx.Node) -> tuple[str, ...]:
    """The inputs of the graph that a node of it reads itself."""
    return tuple(
        source_name(source) or str(source.target)
        for source in node.all_input_nodes
        if source.op == "placeholder"
    )


def _values(node: fx.Node) -> Iterator[str]:
    computes = node.target in ARITHMETIC
    begins = node.target is torch.arange and len(node.args) > 1
    filled = node.target in (torch.full, torch.full_like, "new_full", "fill_", "masked_fill")
    for index, value in enumerate(node.args):
        counts = computes or (begins and index == 0) or (filled and index > 0)
        if isinstance(value, float | bool) or (counts and isinstance(value, int)):
            yield repr(value)
    if node.target is operator.getitem and _is_owned(node.args[0]):
        yield f"at {node.args[1]!r}"  # a row of a parameter
    for name, value in node.kwargs.items():
        if isinstance(value, float | bool) or (name in VALUES and isinstance(value, int)):
            yield f"{name}={value!r}"


def _is_owned(source: Any) -> bool:
    return isinstance(source, fx.Node) and source.op == "placeholder" and not is_argument(source)


_KINDS = frozenset(
    {"Tensor", "number", "float", "bool", "int", "Optional[number]", "Optional[float]", "Optional[bool]"}
)
# Places and sizes along whatever dimension; `_elsewhere` shows those that are not along the sequence.
_SIZES = frozenset({"end", "index", "start", "length", "N", "HxW"})
_LISTS_OF_SIZES = frozenset(
    {"size", "shape", "sizes", "split_sizes", "split_size", "repeats", "normalized_shape"}
)
_NUMBERS_OF_SIZE_TYPE = frozenset({"diagonal"})
_aten = torch.ops.aten
_STRIDED = (_aten.as_strided, _aten.empty_strided, _aten.new_empty_strided)


def _numbers(analysis: Analysis, node: fx.Node) -> Iterator[str]:
    """All that an op is told besides its tensors, but for sizes and places along the sequence."""
    target: Any = node.target
    user_node = analysis.user_node(node)
    fitted = user_node is not None and user_node.meta.get("zeco_fitted")
    for index, parameter in enumerate(target._schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(parameter.name)
        if isinstance(value, int | float):
            named = parameter.name in _NUMBERS_OF_SIZE_TYPE or parameter.name in BOUNDS.get(target, ())
            if named or (str(parameter.type) in _KINDS and parameter.name not in _SIZES):
                shown = f"{value:.4g}" if fitted and isinstance(value, float) else repr(value)
                yield f"{parameter.name}={shown}"
        elif isinstance(value, str | complex | torch.dtype):
            yield f"{parameter.name}={value}"
        elif isinstance(value, list | tuple) and not _are_sizes(target, parameter.name):
            yield from (f"{parameter.name}={each}" for each in _listed(analysis, node, value))
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            yield from _constant(analysis, source)


def _are_sizes(target: Any, name: str) -> bool:
    return name in _LISTS_OF_SIZES or (name == "stride" and target.overloadpacket in _STRIDED)


def _listed(analysis: Analysis, node: fx.Node, values: Sequence[Any]) -> Iterator[int | float]:
    """The numbers of a list: dimensions, shifts, strides; of padding that of other dimensions than the sequence."""
    along: set[int] = set()
    if node.target is _aten.constant_pad_nd.default:
        source = operand(node, 0)
        last = source.meta["val"].dim() - 1
        along = {2 * (last - dim) + side for dim in analysis.track.sequence_dims(source) for side in (0, 1)}
    for place, value in enumerate(values):
        if isinstance(value, int | float) and place not in along:
            yield value


def _constant(analysis: Analysis, source: fx.Node) -> Iterator[str]:
    """What is in a tensor that the code has made of numbers, unless it has rows of the sequence."""
    made = getattr(source.graph.owning_module, str(source.target), None)
    if isinstance(made, torch.Tensor) and not analysis.track.sequence_dims(source):
        content = getattr(made, "constant", made)
        if type(content) is not torch.Tensor:
            yield f"a constant that is not known, {id(made)}"  # like no other
        elif content.numel() <= _MOST_SHOWN:
            yield repr(content.tolist())
        else:
            raw = bytes(content.contiguous().flatten().view(torch.uint8).tolist())
            yield f"{content.numel()} numbers ({hashlib.sha256(raw).hexdigest()[:16]})"


_MOST_SHOWN = 16


@dataclass
class SecondLook:
    """A trace of the user's function on a longer sequence, made when it is asked for, and compared with the first.

    `here` is the analysis of this trace, which has a symbol for the length if `symbolic`, as the other will then;
    `analyse(gm, example_inputs)` gives that of the other. To be used within the compilation of the graph `gm`.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    seq_dim: int
    world_size: int
    symbolic: bool
    here: Analysis
    analyse: Callable[[fx.GraphModule, Sequence[Any]], Analysis]
    length: int = 0
    longer: int = 0
    asked: set[fx.Node] = field(default_factory=set)
    """The ops of the first trace that `at_whole_length` has been asked for."""
    taken: set[fx.Node] = field(default_factory=set)
    """Those that have been written again with the numbers that they have in the other trace."""
    left_behind: list[str] = field(default_factory=torch_private.numbers_left_behind)
    """What this trace leaves in Python objects."""
    left_there: list[str] = field(default_factory=list)
    """What the other one leaves there."""

    def __post_init__(self) -> None:
        self.first = steps_of(self.here)

    @cached_property
    def second(self) -> list[Step]:
        """The steps of the other trace. Raises LengthInValue where there is none."""
        return steps_of(self.there)

    @cached_property
    def there(self) -> Analysis:
        """The analysis of the other trace. Raises LengthInValue where there is none."""
        inputs = graph_inputs(self.gm, self.example_inputs, self.seq_dim)
        self.length, self.longer = self._lengths(inputs)
        found: list[Analysis] = []

        def look(other: fx.GraphModule, others: Sequence[Any]) -> None:
            self.left_there = torch_private.numbers_left_behind()
            found.append(self.analyse(other, others))

        failed = another_length.look_at(
            another_length.longer_inputs(inputs, self.example_inputs, self.longer, symbolic=self.symbolic),
            look,
        )
        if failed is not None:
            raise LengthInValue(
                f"{self.length} (the tokens of this rank's slice)",
                location=another_length.first_location(self.gm),
                why="the code fixes the length to a constant, so it was traced once more, on inputs of "
                f"{self.longer} tokens, to see what depends on it. That failed: {type(failed).__name__}: "
                f"{failed}",
            ) from failed
        if not found:
            raise LengthInValue(
                f"{self.length} (the tokens of this rank's slice)",
                location=another_length.first_location(self.gm),
                why="the code fixes the length to a constant, and cannot be traced for another one.",
            )
        return found[0]

    def _lengths(self, inputs: Sequence[GraphInput]) -> tuple[int, int]:
        """The length, and the longer one to look at."""
        each = next(each for each in inputs if each.along is not None)
        length: int = self.example_inputs[each.index].shape[each.along]
        nodes = len(self.gm.graph.nodes)
        unrolled = nodes >= 2 * length and not self.symbolic
        return length, length * (2 if unrolled and nodes * self.world_size > _MOST_NODES else self.world_size)

    def take_end_rows(self) -> None:
        """Slices that take as many rows of the whole sequence, from the same end, are rows of no slice from here on."""
        if not any(step.node is not None and is_slice_of_rows(self.here, step.node) for step in self.first):
            return  # nothing that would need the other trace
        if len(self.second) != len(self.first):  # of all rows of a slice the next op may be another one
            for one, other in zip(self.first, self.second, strict=False):
                refuse_rows_of_several(one, other, self.length)
                if one.op != other.op:
                    return
        if len(self.second) != len(self.first) or not self._is_whole:
            return
        pairs = [(s.node, o.node) for s, o in zip(self.first, self.second, strict=True) if s.node and o.node]
        found = [pair for pair in pairs if takes_rows(self.here, pair[0], self.there, pair[1])]
        if found:
            for analysis, slices in zip((self.here, self.there), zip(*found, strict=True), strict=True):
                take_rows(analysis, slices)
            self.first, self.second = steps_of(self.here), steps_of(self.there)

    def compare(self) -> None:
        """Raises LengthInValue where the user's function, traced on a longer sequence, is another program."""
        second = self.second
        # Masks that have been made for the whole sequence (passes/rows_and_columns.py) are there no more: of what size
        # they were is of no consequence.
        there = set(self.gm.graph.nodes)
        gone = {
            place
            for place, step in enumerate(self.first)
            if step.is_constant and step.node in self.asked and step.user_node not in there
        }

        # Nor is it of what has been computed again with the numbers of the whole sequence what its numbers were.
        renumbered = {
            place
            for place, step in enumerate(self.first)
            if step.node in self.taken and step.user_node not in there
        }

        def seen(steps: list[Step]) -> list[Step]:
            out = [replace(step, along=()) if place in gone else step for place, step in enumerate(steps)]
            return without_copies(
                [replace(step, numbers=()) if place in renumbered else step for place, step in enumerate(out)]
            )

        compare_steps(seen(self.first), seen(second), self.length, self.longer)
        self._refuse_numbers_left_behind()

    def _refuse_numbers_left_behind(self) -> None:
        """Raises LengthInValue for a number from the length that the function returns or leaves in an object: the next
        call, or the caller, would take the slice's for that of the whole sequence."""
        if self.left_behind == self.left_there:
            return
        pairs = zip(self.left_behind, self.left_there, strict=False)
        here, there = next(
            (pair for pair in pairs if pair[0] != pair[1]),
            (f"{len(self.left_behind)} numbers", f"{len(self.left_there)}"),
        )
        raise LengthInValue(
            f"{here}, which is {there} for {self.longer} tokens instead of {self.length},",
            location=another_length.first_location(self.gm),
            why="the function returns this number, or keeps it in an object, where the caller or the next call takes "
            "it for one of the whole sequence.",
            hints=["keep it in a buffer, or count tokens outside of the compiled model"],
        )

    def take_numbers(self) -> list[Decision]:
        """Gives elementwise ops on values that do not run along the sequence (the sum of a loss, counts) the numbers
        that they have in the other trace, where that is of the whole sequence. Returns what has been changed.

        Such a value is the unsharded model's on every rank; so what is computed of it is, with that model's numbers.
        """
        if len(self.second) != len(self.first) or not self._is_whole:
            return []
        there, groups = set(self.gm.graph.nodes), Counter(step.user_node for step in self.first)
        taken = []
        for place, (one, other) in enumerate(zip(self.first, self.second, strict=True)):
            same = replace(one, numbers=other.numbers)
            if one.numbers == other.numbers or same.what != other.what or one.user_node not in there:
                continue
            if one.user_node is None or not one.is_total or groups[one.user_node] != 1:
                continue
            if _take_numbers(one, other):
                self.first[place] = same
                name = op_name(one.user_node)
                found = f"{', '.join(one.numbers)} of the slice became {', '.join(other.numbers)}"
                taken.append(
                    Decision(
                        str(one.user_node), name, "the number of the whole sequence", one.location, found
                    )
                )
        return taken

    @property
    def _is_whole(self) -> bool:
        return self.longer == self.length * self.world_size

    @cached_property
    def _places(self) -> dict[fx.Node, int]:
        return {step.node: place for place, step in enumerate(self.first) if step.node is not None}

    def at_whole_length(self, node: fx.Node) -> fx.Node | None:
        """The same op in the other trace, with its numbers as they are there; None where there is no such op, or the
        other trace is not of the whole sequence. That both traces are the same program is for `compare` to say."""
        self.asked.add(node)
        if node.target is operator.getitem:
            source = self.at_whole_length(operand(node, 0))
            parts = [] if source is None else [n for n in source.users if n.target is operator.getitem]
            return next((n for n in parts if n.args[1] == node.args[1]), None)
        second, place = self.second, self._places.get(node)
        if place is None or len(second) != len(self.first) or not self._is_whole:
            return None
        other = second[place].node
        return other if other is not None and other.target is node.target else None
