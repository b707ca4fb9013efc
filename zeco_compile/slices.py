"""Which tensors are slices of the sequence because a compiled call has returned them.

A model may keep what it computes: the last hidden states, a table of rotary angles, a list of outputs. The next call
then meets a tensor that the model owns, which would be taken for one that is whole on every rank, and is not. So the
results of every call are marked, as :func:`mark_sequence` does it, and the next graph takes a marked tensor for what
it is. A view of one that was made outside of a graph carries no mark; its memory says that it is part of a slice, and
it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeco_compile.lowering.torch_private import storage_key
from zeco_compile.marks import UNMARKED, mark_sequence, sequence_mark
from zeco_compile.passes.errors import SequenceInputError
from zeco_compile.passes.inputs import GraphInput

# References to storages that are gone are thrown away when there are twice as many as were left the last time.
_FEWEST = 256

_lock = threading.Lock()
_returned: dict[int, StorageWeakRef] = {}
_most = _FEWEST


def mark_results(
    inputs: Sequence[GraphInput], values: Sequence[Any], dims: Sequence[int | None] | None, results: Any
) -> None:
    """Tells the graphs to come where the sequence is in what a call was given and has returned."""
    for each in inputs:
        if each.kind == "argument":
            mark_sequence(values[each.index], each.along)
    if dims is None:
        return
    given = {storage_key(values[each.index]) for each in inputs if each.kind in ("argument", "buffer")}
    for result, dim in zip(results, dims, strict=True):
        if isinstance(result, torch.Tensor):
            mark_sequence(result, dim)
            # rows of something that was given, of a table say, are in memory that others read as a whole
            if dim is not None and storage_key(result) not in given:
                _remember(result)


def refuse_kept_slices(inputs: Iterable[GraphInput], values: Sequence[Any]) -> None:
    """Raises SequenceInputError for a tensor that counts as whole on every rank, and is part of a slice."""
    for each in inputs:
        if each.kind not in ("argument", "buffer") or each.along is not None:
            continue
        value = values[each.index]
        if sequence_mark(value) is UNMARKED and _is_returned(value):
            raise SequenceInputError(
                each.name,
                tuple(value.shape),
                "it is a view of what a compiled call has returned, this rank's slice of something along the sequence, "
                "but would be taken for a tensor that is whole on every rank.",
                hints=[
                    "keep what the compiled model returns as it is, and take the view of it inside of the model",
                    "call zeco_compile.mark_sequence(tensor, dim) on the view if it still is a slice along dim",
                    "keep a clone() if it is the same on every rank",
                ],
            )


def _remember(result: torch.Tensor) -> None:
    global _most
    storage = result.untyped_storage()
    with _lock:
        _returned[storage_key(result)] = StorageWeakRef(storage)
        if len(_returned) > _most:
            for key in [key for key, reference in _returned.items() if reference.expired()]:
                del _returned[key]
            _most = max(_FEWEST, 2 * len(_returned))


def _is_returned(value: torch.Tensor) -> bool:
    with _lock:
        reference = _returned.get(storage_key(value))
        return reference is not None and not reference.expired()
