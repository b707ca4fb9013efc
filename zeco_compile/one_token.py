"""One token per rank: what has to be done is decided on a trace of a few, and made for one.

Of one token a trace says next to nothing. Its first row is its last, a loop over the sequence is its body, a mask is a
number, and an axis of one row could be any other. A length of one cannot be a symbol either. So the user's function is
traced once more, on inputs of a few tokens with a symbol for the length; that graph is rewritten, and what comes out
runs with the symbol set to one. Where the code fixes the length to a constant (a loop over it) there is no such graph,
and the slice is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zeco_compile import another_length
from zeco_compile.passes.branches import Assumptions, assumptions
from zeco_compile.passes.errors import CompileError, LengthInValue
from zeco_compile.passes.inputs import GraphInput, graph_inputs
from zeco_compile.passes.report import Report
from zeco_compile.passes.torch_private import constant_size, source_name, with_numbers
from zeco_compile.rewrite import Rewritten
from zeco_compile.settings import Settings

_TRACED = 5
"""Tokens: so many that a row or a few less of them are still a sequence (`x[:, 1:]`), whose length can be a symbol."""


@dataclass(frozen=True)
class Decided:
    """A rewritten graph for one token, which of the inputs of the graph that Dynamo asked for it takes, and what has to
    be known of it at every call."""

    gm: fx.GraphModule
    kept: list[int]
    rewritten: Rewritten
    assumed: Assumptions


def is_one_token(inputs: Sequence[GraphInput], values: Sequence[Any]) -> bool:
    return any(each.along is not None and values[each.index].shape[each.along] == 1 for each in inputs)


def decide(
    gm: fx.GraphModule,
    inputs: Sequence[GraphInput],
    example_inputs: Sequence[Any],
    settings: Settings,
    rewrite: Callable[..., Rewritten],
) -> Decided:
    """`rewrite`, of the same function traced on a few tokens, made for the one of `gm`. To be called within the
    compilation of `gm`. Raises what `rewrite` raises, and LengthInValue where one token cannot be decided on."""
    found: list[Decided] = []

    def look(other: fx.GraphModule, others: Sequence[Any]) -> None:
        there = graph_inputs(other, others, settings.seq_dim)
        assumed = assumptions(other, there, others)
        if not assumed.lengths:
            raise _refusal(gm, "the code fixes the length to a constant (a loop over it, a function of it)")
        symbols = dict.fromkeys(assumed.lengths, 1)
        _refuse_other_results(gm, other, symbols)
        assumed.refuse_broken(settings.world_size)
        places = _places(gm, other, inputs)
        rewritten = rewrite(other, others, assumed=assumed)
        # what the passes took for granted of a slice, too: that it has all the rows that a neighbour needs
        broken = assumed.until_now(other, others).broken(1)
        if broken is not None:
            raise _refusal(gm, f"the way that the code, or what is made of it, goes is one of {broken.holds}")
        masks = [replace(mask, index=places[mask.index]) for mask in rewritten.masks]
        made, left = with_numbers(other, symbols)
        made.meta.update(gm.meta)
        kept = [places[index] for index in left]
        found.append(Decided(made, kept, replace(rewritten, masks=masks), assumed))

    replaced = another_length.longer_inputs(inputs, example_inputs, _TRACED, symbolic=True, contiguous=True)
    failed = another_length.look_at(replaced, look)
    if isinstance(failed, CompileError):
        raise failed
    if failed is not None:
        why = f"traced for a few tokens, it fails: {type(failed).__name__}: {failed}"
        raise _refusal(gm, why) from failed
    if not found:
        raise _refusal(gm, "the code cannot be traced for another length")
    return found[0]


def correct(report: Report) -> None:
    """The report of the trace that was decided on is that of one token."""
    report.length = "1"
    for region in report.regions:
        region.sizes["T"] = 1


def _refusal(gm: fx.GraphModule, why: str) -> LengthInValue:
    return LengthInValue(
        "1 (the one token of this rank's slice)",
        location=another_length.first_location(gm),
        why=f"{why}, and one token by itself does not show what the code does to a sequence.",
        hints=["give each rank at least two tokens"],
    )


def _places(gm: fx.GraphModule, other: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[int, int]:
    """For each input of the other graph that is no size, which of this graph's it is."""
    here = {source_name(each.node): each.index for each in inputs}
    places: dict[int, int] = {}
    for index, node in enumerate(n for n in other.graph.nodes if n.op == "placeholder"):
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            continue
        name = source_name(node)
        if name not in here:
            raise _refusal(gm, f"traced for a few tokens, it reads `{name or node}` too")
        places[index] = here[name]
    return places


def _refuse_other_results(gm: fx.GraphModule, other: fx.GraphModule, symbols: dict[Any, int]) -> None:
    """Dynamo's code around the graph takes its results as the graph of one token has them."""
    here, there = _results(gm, symbols), _results(other, symbols)
    if here != there:
        raise _refusal(
            gm, f"its results are {', '.join(here)}, and traced for a few tokens {', '.join(there)}"
        )


def _results(gm: fx.GraphModule, symbols: dict[Any, int]) -> list[str]:
    (output,) = gm.graph.find_nodes(op="output")
    shown: list[str] = []
    for each in output.args[0]:
        value = each.meta.get("example_value") if isinstance(each, fx.Node) else each
        if isinstance(value, torch.Tensor):
            shape = [constant_size(size, symbols) for size in value.shape]
            shown.append(f"{str(value.dtype)[6:]} {shape}")
        else:
            shown.append(str(value))
    return shown
