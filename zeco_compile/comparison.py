"""Two traces of one function, op by op: what differs depends on the length in a way that is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zeco_compile.passes.end_rows import as_many_as_there_are, rows_taken
from zeco_compile.passes.errors import LengthInValue, UnsupportedOp
from zeco_compile.passes.report import user_op_name
from zeco_compile.passes.schema import RESHAPES

if TYPE_CHECKING:
    from zeco_compile.second_look import Step


def compare_steps(first: Sequence[Step], second: Sequence[Step], length: int, longer: int) -> None:
    """Op by op: what is left of a loop that was understood is the same whatever its length."""
    for one, other in zip(first, second, strict=False):
        if one.what != other.what:
            refuse_rows_of_several(one, other, length)
            _refuse(one, *_told_apart(one, other), length, longer)
    if len(first) != len(second):
        rest = (first if len(first) > len(second) else second)[min(len(first), len(second))]
        _refuse(rest, f"{len(first)} operations", f"{len(second)}", length, longer)


def refuse_rows_of_several(one: Step, other: Step, length: int) -> None:
    """Raises UnsupportedOp for a slice that takes as many rows at an end of the sequence as one rank has, or more."""
    rows = as_many_as_there_are(one.node, other.node)
    if rows is not None:
        raise UnsupportedOp(
            one.op if one.user_node is None else user_op_name(one.user_node),
            location=one.location,
            why=f"it takes {rows} rows at an end of the sequence, and one rank has {length}.",
            hints=[f"give each rank more than {rows} tokens, or take fewer rows"],
            node=str(one.user_node),
        )


def without_copies(steps: Sequence[Step]) -> list[Step]:
    """The steps that compute: no copies, and one name for all reshapes. Whether a reshape has to copy depends on the
    strides, and of one row (`x[:, :-3]` of four) those are others than of several."""
    names: dict[str, str] = {}
    out: list[Step] = []
    for place, step in enumerate(steps):
        reads = tuple(_renamed(each, names) for each in step.reads)
        if step.op == str(torch.ops.aten.clone.default) and len(reads) == 1:
            names[f"step {place}"] = reads[0]
            continue
        names[f"step {place}"] = f"step {len(out)}"
        reshapes = step.op in map(str, RESHAPES)
        out.append(replace(step, op=str(RESHAPES[0]) if reshapes else step.op, reads=reads))
    return out


def _renamed(read: str, names: dict[str, str]) -> str:
    """What a step reads, perhaps as one of several results ("1 of step 5"), under the name that it has now."""
    place, of, source = read.rpartition(" of ")
    return f"{place}{of}{names.get(source, source)}"


def _told_apart(one: Step, other: Step) -> tuple[str, str]:
    rows, more = (None if each.node is None else rows_taken(each.node) for each in (one, other))
    if rows is not None and more is not None and rows != more:
        return rows, more
    for details in (lambda s: str(s), lambda s: f"{s} ({', '.join(s.along) or 'all rows'})"):
        if details(one) != details(other):
            return details(one), details(other)
    return tuple(f"{each} of {', '.join(each.reads)}" for each in (one, other))  # type: ignore[return-value]


def _refuse(step: Step, before: str, after: str, length: int, longer: int) -> None:
    raise LengthInValue(
        f"{before}, which is {after} for {longer} tokens instead of {length},",
        location=step.location,
        why="the code is another program for a longer sequence, and what a slice has to compute for the whole one "
        "cannot be seen: the length is a constant here (a loop over it, or a function of it).",
        hints=[
            "do not compute with the length, or with the number of a step, beside a loop over the sequence",
            "give each rank more tokens, if the model treats some of the first ones in another way, or whole chunks, "
            "if it pads the last one",
        ],
    )
