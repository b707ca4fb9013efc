"""What the trace took for granted about the length: a branch of the user's code, a slice that takes all rows.

`if x.shape[1] > 8`, `x[:, :8]`, a table with fewer rows than the sequence: where the trace has a symbol for
the length, Dynamo notes what it assumed of it as a guard. The guards hold for the slice; the unsharded model
would have been asked about the whole sequence. An assumption that does not hold for that is a branch that it
would not have taken. What holds depends on the length of each call, so `refuse_broken` is called at every one.

Where the trace has a constant length there are no guards, and a second trace is compared with it (second_look.py).
With one token per rank that cannot show what a slice leaves out; `refuse_constant_slices` looks at the slices then.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import LengthInValue, UnsupportedOp
from zeco_compile.passes.inputs import GraphInput
from zeco_compile.passes.locations import of_short_frame, user_location
from zeco_compile.passes.report import op_name
from zeco_compile.passes.sizes import same_size, size_of


@dataclass(frozen=True)
class Assumption:
    """Something that is true of the slice's length; `source` is the user's line as far as it is known."""

    holds: Any
    source: str


@dataclass(frozen=True)
class Assumptions:
    """All of one trace. `lengths` are the symbols of the length, `others` the values of other symbols."""

    found: tuple[Assumption, ...]
    lengths: tuple[Any, ...]
    others: Mapping[Any, int]
    equal: list[Assumptions] = field(default_factory=list)
    """Those of other traces that turned out to be the same program once linear attention had been recognised: the
    code may go any of these ways for the whole sequence (padded to whole chunks, or not)."""

    def broken(self, whole_length: int) -> Assumption | None:
        """The first assumption that the length of the whole sequence breaks."""
        values = dict.fromkeys(self.lengths, whole_length) | dict(self.others)
        numbers = {s: sympy.Integer(v) for s, v in values.items()}
        return next((each for each in self.found if each.holds.xreplace(numbers) == sympy.false), None)

    def refuse_broken(self, whole_length: int) -> None:
        """Raises LengthInValue if the whole sequence's length breaks an assumption, and is none of an equal trace."""
        broken = self.broken(whole_length)
        if broken is not None and all(each.broken(whole_length) for each in self.equal):
            raise self.refusal(broken, whole_length)

    @staticmethod
    def refusal(broken: Assumption, whole_length: int) -> LengthInValue:
        location = of_short_frame(broken.source)
        place = "here" if location.known else f"at `{broken.source}`"
        return LengthInValue(
            str(broken.holds),
            location=location,
            why=f"{place} the code, or an operation in it, goes another way for a slice than "
            f"for the whole sequence of {whole_length} tokens.",
            hints=[
                "do not decide by the length of the sequence, or by a constant number of tokens "
                "(x[:, :8], x[:, -8:])",
                "give each rank so many tokens that the slice goes the same way",
            ],
        )


def assumptions(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], example_inputs: Sequence[Any]
) -> Assumptions:
    """The assumptions of Dynamo's trace. To be called before anything else is traced under its fake mode."""
    mode, fakes = torch_private.fake_inputs(gm, example_inputs)
    lengths: set[Any] = set()
    others: dict[Any, int] = {}
    for each in inputs:
        fake, real = fakes[each.index], example_inputs[each.index]
        if not isinstance(fake, torch.Tensor):
            continue
        for dim, (size, value) in enumerate(zip(fake.shape, real.shape, strict=True)):
            for symbol in torch_private.symbols_of_size(size):
                if dim == each.along:
                    lengths.add(symbol)
                else:
                    others[symbol] = int(value)
    found = tuple(
        Assumption(expression, source)
        for expression, source in torch_private.shape_guards(mode)
        if expression.free_symbols & lengths
    )
    return Assumptions(found, tuple(lengths), others)


def refuse_constant_slices(analysis: Analysis) -> None:
    """Raises UnsupportedOp for `x[:, :8]` along the sequence where the slice has no more rows than that.

    Such a slice takes all rows here, so that no op is left of it in the graph, and fewer from the whole
    sequence. A constant that is just the length may have been written as the length; that cannot be seen, so
    it is refused.
    """
    for user_node in analysis.gm.graph.nodes:
        for source, dim, bounds in _slices(user_node):
            if not any(isinstance(b, int) and b not in (0, _END) for b in bounds):
                continue
            values = analysis.shadow.tensors_read(user_node, source)
            made = analysis.shadow.tensors_made(user_node)
            if not values or not made or dim not in analysis.track.sequence_dims(values[0]):
                continue
            before, after = (size_of(n.meta["val"].numel()) for n in (values[0], made[0]))
            if not same_size(before, after):
                continue
            raise UnsupportedOp(
                op_name(user_node),
                location=user_location(user_node),
                why="it takes a constant number of rows along the sequence, and this rank's slice has no more: of "
                "the whole sequence it may be a part.",
                hints=[
                    "leave it out if it means all rows; x.shape[1] itself is a constant in a loop over the length"
                ],
                node=str(user_node),
            )


def writes_constant_rows(analysis: Analysis, user_node: fx.Node) -> bool:
    """`y[:, -2:] = v`, a constant number of rows along the sequence: of one token they are all there are."""
    return user_node.target is operator.setitem and any(
        any(isinstance(b, int) and b not in (0, _END) for b in bounds)
        and any(
            dim in analysis.track.sequence_dims(n) for n in analysis.shadow.tensors_read(user_node, source)
        )
        for source, dim, bounds in _slices(user_node)
    )


_END = 2**63 - 1


def _slices(node: fx.Node) -> Iterator[tuple[fx.Node, int, tuple[Any, Any]]]:
    """(tensor, dimension, (start, end)) of each slice that a node takes."""
    if node.target in (operator.getitem, operator.setitem, "narrow", torch.narrow):
        source, *rest = node.args
        if not isinstance(source, fx.Node) or not isinstance(source.meta.get("example_value"), torch.Tensor):
            return
        if node.target not in (operator.getitem, operator.setitem):
            given: dict[str, Any] = dict(zip(("dim", "start", "length"), rest, strict=False)) | dict(
                node.kwargs
            )
            yield (
                source,
                int(given["dim"]) % source.meta["example_value"].dim(),
                (given["start"], given["length"]),
            )
            return
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        total = source.meta["example_value"].dim()
        taken = sum(each is not None and each is not Ellipsis for each in index)
        dim = 0
        for each in index:
            if each is Ellipsis:
                dim += total - taken
            elif isinstance(each, slice):
                yield source, dim, (each.start, each.stop)
                dim += 1
            elif each is not None:
                dim += 1
