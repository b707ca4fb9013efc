"""The state that a loop over the sequence leaves behind, where nothing is read out of the states before: for analysis
only.

What is recognised has a row for each position. `passes/last_states.py` gives such a loop a read-out that it has not,
and this op says which state it is the read-out of. It is in a graph only between passes.
"""

from __future__ import annotations

from torch import Tensor

from zeco_compile.lowering.registry import LOCAL_TAGS, define


def _last(rows: Tensor, state: Tensor) -> Tensor:
    """`state`, for `rows` that have been read out of all states up to it."""
    return state.clone()


define("last_state(Tensor rows, Tensor state) -> Tensor", _last, _last, LOCAL_TAGS)
