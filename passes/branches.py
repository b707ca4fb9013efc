"""What the trace took for granted about the length: a branch of the user's code, a slice that takes all rows.

`if x.shape[1] > 8`, `x[:, :8]`, a table with fewer rows than the sequence: where the trace has a symbol for
the length, Dynamo notes what it assumed of it as a guard. The guards hold for the slice; the unsharded model
would have been asked about the whole sequence. An assumption that does not hold for that is a branch that it
would not have taken. What holds depends on the length of each call, so `refuse_broken` is called at every one.

Where the trace has a constant length there are no guards, and a second trace is compared with it (second_look.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.passes.inputs import GraphInput
from zeco_compile.passes.locations import of_short_frame


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

    def until_now(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Assumptions:
        """With what has been taken for granted of the same symbols since, by the passes too."""
        mode, _ = torch_private.fake_inputs(gm, example_inputs)
        return replace(self, found=_found(mode, set(self.lengths)))

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
    return Assumptions(_found(mode, lengths), tuple(lengths), others)


def _found(mode: Any, lengths: Set[Any]) -> tuple[Assumption, ...]:
    return tuple(
        Assumption(expression, source)
        for expression, source in torch_private.shape_guards(mode)
        if expression.free_symbols & lengths
    )
