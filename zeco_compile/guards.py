"""What is checked around a compilation, and at every call of what came out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zeco_compile.lowering.agreement import RankMissing, check_lengths, give_up
from zeco_compile.lowering.errors import RanksDisagree, UnequalShards
from zeco_compile.lowering.groups import SameGroup
from zeco_compile.marks import UNMARKED, sequence_mark
from zeco_compile.passes import torch_private
from zeco_compile.passes.branches import Assumptions
from zeco_compile.passes.errors import GraphBreak, MaskChanged, RecompilationLimit, SequenceInputError
from zeco_compile.passes.inputs import GraphInput, graph_inputs
from zeco_compile.passes.locations import innermost_user_frame
from zeco_compile.passes.masks import Buffer
from zeco_compile.rewrite import Rewritten
from zeco_compile.settings import Settings
from zeco_compile.slices import mark_results, refuse_kept_slices


@contextlib.contextmanager
def announced(group: str) -> Iterator[None]:
    """Tells the ranks that may be waiting for this one of an error that is its own."""
    try:
        yield
    except (UnequalShards, RanksDisagree, RankMissing):
        raise  # on every rank
    except Exception as error:
        if not torch_private.is_dynamo_restart(error):
            give_up(group, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise


def refuse_graph_break(gm: fx.GraphModule, settings: Settings) -> None:
    """Raises GraphBreak for a graph that ends in one, unless the user vouches for the code in between."""
    found = torch_private.graph_break(gm)
    if found is not None and settings.graph_breaks == "error" and settings.world_size > 1:
        reason, stack = found
        raise GraphBreak(reason, location=innermost_user_frame(stack))


def refuse_last_recompilation() -> None:
    """Raises RecompilationLimit at the last compilation that Dynamo allows."""
    left = torch_private.compiles_left()
    if left is not None and left < 1:
        raise RecompilationLimit()


def lengths(inputs: Sequence[GraphInput], values: Sequence[Any]) -> tuple[int, ...]:
    """The rows of each input along the sequence, in order."""
    return tuple(int(values[i.index].shape[i.along]) for i in inputs if i.along is not None)


def given(inputs: Sequence[GraphInput], values: Sequence[Any]) -> str:
    """What every rank has to be given alike: the sizes of each argument, but for that along the sequence (`*`), which
    is compared by itself, and the numbers."""
    shown = []
    for each in inputs:
        value = values[each.index]
        if each.kind in ("argument", "buffer") and value.dim() == 0 and value.device.type == "cpu":
            value = value.item()  # as Dynamo hands over a number that varies, an argument or an attribute
        if each.kind != "size" and isinstance(value, int | float):
            shown.append(f"{each.name} = {value!r}")
        elif each.kind == "argument":
            sizes = ("*" if dim == each.along else str(int(n)) for dim, n in enumerate(value.shape))
            shown.append(f"{each.name} [{', '.join(sizes)}]")
    return ", ".join(shown)


def checked(
    compiled: Callable[..., Any],
    kept: Sequence[int],
    inputs: Sequence[GraphInput],
    rewritten: Rewritten,
    assumed: Assumptions,
    example_inputs: Sequence[Any],
    settings: Settings,
    key: str,
    group: SameGroup,
) -> Callable[..., Any]:
    """`compiled`, which takes the arguments `kept` of the graph's, behind the checks of every call: the ranks are those
    of the compilation, their slices are equally long, each input runs along the sequence in the dimension it was
    compiled for, the whole sequence is as long as the code's branches took for granted, and the masks whose values
    were relied on are still those. What comes out is marked as what it is."""
    relied_on = [_ReliedOn(mask, example_inputs[mask.index]) for mask in rewritten.masks]
    run = compiled
    if len(kept) < len(example_inputs):

        def run(*values: Any) -> Any:
            return compiled(*(values[index] for index in kept))

    tensors = [each for each in inputs if each.kind in ("argument", "buffer")]

    def call(*values: Any) -> Any:
        group.refuse_another()
        with announced(settings.group):
            for mask in relied_on:
                mask.refuse_another(values)
            if settings.world_size > 1:
                for each in tensors:
                    _refuse_other_mark(each, values[each.index], settings.seq_dim)
                refuse_kept_slices(tensors, values)
        if settings.world_size > 1:
            rows = lengths(inputs, values)
            check_lengths(settings.group, rows, f"{key} of {given(inputs, values)}")
            assumed.refuse_broken(max(rows, default=0) * settings.world_size)
        results = run(*values)
        if settings.world_size > 1:
            mark_results(tensors, values, rewritten.output_dims, results)
        return results

    return call


def refuse_unknown_intermediates(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> None:
    """Raises SequenceInputError for an input of a graph behind a break that no graph before it has returned."""
    if settings.world_size == 1 or not torch_private.is_behind_graph_break():
        return
    for each in graph_inputs(gm, example_inputs, settings.seq_dim):
        value = example_inputs[each.index]
        if each.kind == "argument" and value.dim() and sequence_mark(value) is UNMARKED:
            raise SequenceInputError(
                each.name,
                tuple(value.shape),
                "it was computed between two graphs, so it is not known which of its dimensions is the sequence.",
                hints=[
                    "remove the graph break before it (TORCH_LOGS=graph_breaks shows them)",
                    "call zeco_compile.mark_sequence(tensor, dim) on it in the code between the graphs",
                ],
            )


class _ReliedOn:
    """A mask, and the state of its tensor when its values were last looked at."""

    def __init__(self, mask: Buffer, value: torch.Tensor) -> None:
        self.mask = mask
        self.seen = self._state(value)

    def refuse_another(self, values: Sequence[Any]) -> None:
        """Raises MaskChanged. Reads the values only if the tensor is another one or was written to."""
        value = values[self.mask.index]
        state = self._state(value)
        if state == self.seen:
            return
        if not self.mask.still_holds(value):
            raise MaskChanged(self.mask.name)
        self.seen = self._state(value)

    @staticmethod
    def _state(value: torch.Tensor) -> tuple[int, int]:
        return value.data_ptr(), -1 if value.is_inference() else value._version


def _refuse_other_mark(each: GraphInput, value: torch.Tensor, seq_dim: int) -> None:
    mark = sequence_mark(value)
    default = seq_dim if each.kind == "argument" and value.dim() else None
    along = default if mark is UNMARKED else mark
    if along != each.along:
        raise SequenceInputError(
            each.name,
            tuple(value.shape),
            f"it is marked to run along the sequence in dimension {along}, but the model was compiled for an input "
            f"that does so in dimension {each.along}.",
            hints=["mark inputs alike at every call, or compile the model a second time for the other kind"],
        )
