"""The mathematics of gated linear attention on one device.

``recurrence`` is the definition, step by step. ``devices`` says which of two implementations runs: ``chunked``, in
PyTorch on any device (with ``chunks``: layout, scans; ``pairs``: inside a chunk), or ``fused``, in Triton on CUDA
devices (with ``triton_channel``, ``triton_head``: its kernels by the kind of gate; ``triton_shared``,
``triton_math``). ``shapes`` says what fits, for both; ``errors`` what is raised.
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
