"""An input's own sequence dimension, when it is not the one that the option ``seq_dim`` names.

The mark is an attribute of the tensor object, as ``torch._dynamo.mark_dynamic`` does it, so the backend
finds it on the example inputs, which are the caller's own tensors. A view or a copy of a marked tensor is
not marked.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from torch import Tensor

_ATTRIBUTE = "_zeco_sequence_dim"


class _Unmarked(Enum):
    UNMARKED = "unmarked"


UNMARKED: Final = _Unmarked.UNMARKED


def mark_sequence(tensor: Tensor, dim: int | None) -> Tensor:
    """Says that ``tensor`` runs along the sequence in ``dim``, or (None) that every rank holds all of it.

    Returns the same tensor, any shape and dtype. ``dim`` may be negative. Mark before the compiled
    model's first call with such an input: the mark is read when the graph is compiled.

    Raises IndexError when the tensor has no such dimension and TypeError when it is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"mark_sequence marks tensors, not {type(tensor).__name__}")
    if dim is not None:
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"mark_sequence: dim {dim} of a tensor with {tensor.dim()} dimensions")
        dim %= tensor.dim()
    setattr(tensor, _ATTRIBUTE, dim)
    return tensor


def sequence_mark(tensor: Tensor) -> int | Literal[_Unmarked.UNMARKED] | None:
    """The dimension that :func:`mark_sequence` gave, None for "has none", ``UNMARKED`` when never marked."""
    mark: int | Literal[_Unmarked.UNMARKED] | None = getattr(tensor, _ATTRIBUTE, UNMARKED)
    return mark
