"""What the trace took for granted about the length: a branch of the user's code, a slice that a short input fills.

`if x.shape[1] > 8`, `x[:, :8]`, a table with fewer rows than the sequence: where the trace has a symbol for the
length, Dynamo notes what it assumed of it as a guard. The guards hold for the slice; the unsharded model would have
been asked about the whole sequence. An assumption that does not hold for that is a branch that it would not have
taken. What holds depends on the length of each call, so `refuse_broken` is called at every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.passes.inputs import GraphInput
from zeco_compile.passes.locations import UNKNOWN


@dataclass(frozen=True)
class Assumption:
    """Something that is true of the slice's length; `source` is the user's line as far as it is known."""

    holds: Any
    source: str


@dataclass(frozen=True)
class Assumptions:
    """All of one trace. `lengths` are the symbols of the length, `others` the other symbols' values at hand."""

    found: tuple[Assumption, ...]
    lengths: tuple[Any, ...]
    others: Mapping[Any, int]
    _checked: set[int] = field(default_factory=set)

    def refuse_broken(self, whole_length: int) -> None:
        """Raises LengthInValue for the first assumption that the whole sequence's length breaks."""
        if whole_length in self._checked:
            return
        values = dict.fromkeys(self.lengths, whole_length) | dict(self.others)
        for each in self.found:
            if each.holds.xreplace({s: sympy.Integer(v) for s, v in values.items()}) == sympy.false:
                raise LengthInValue(
                    str(each.holds),
                    location=UNKNOWN,
                    why=f"at `{each.source}` the code, or an operation in it, goes another way for a slice than for "
                    f"the whole sequence of {whole_length} tokens.",
                    hints=[
                        "do not decide by the length of the sequence, or by a constant number of tokens "
                        "(x[:, :8], x[:, -8:])",
                        "give each rank so many tokens that the slice goes the same way",
                    ],
                )
        self._checked.add(whole_length)


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
