"""The mathematics of gated linear attention on one device.

``recurrence`` is the definition, step by step; ``chunked`` is what runs. Everything else serves ``chunked``:
``shapes`` (what fits), ``chunks`` (layout, scans), ``pairs`` (inside a chunk), ``errors``.
"""

from zeco_compile.kernels.chunked import (
    Gradients,
    backward,
    combine,
    combine_backward,
    diagonal,
    diagonal_backward,
    rank_dstate,
    rank_state,
)
from zeco_compile.kernels.errors import InvalidShapes, ZecoError
from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.kernels.shapes import state_dtype

__all__ = [
    "Gradients",
    "InvalidShapes",
    "ZecoError",
    "backward",
    "combine",
    "combine_backward",
    "diagonal",
    "diagonal_backward",
    "rank_dstate",
    "rank_state",
    "recurrent_gated_linear_attention",
    "state_dtype",
]
