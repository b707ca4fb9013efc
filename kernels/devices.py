"""Which implementation a problem gets: of its device, dtypes and sizes, never of the user's choice."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

# A state's tile has to fit the registers and the shared memory of one multiprocessor.
MAX_KEY, MAX_VALUE = 256, 512
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def triton_available() -> bool:
    """Whether Triton is installed; for CUDA devices PyTorch brings it."""
    return importlib.util.find_spec("triton") is not None


@cache
def _has_matrix_units(device: torch.device) -> bool:
    # bf16 and tf32 products begin with Ampere; ROCm's Triton is not tested
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def is_fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> bool:
    """Whether the Triton kernels of ``fused.py`` take it: CUDA, nothing float64, K <= 256, V <= 512.

    Also of fake tensors, when a graph is traced: the answer is the same as when it runs.
    """
    given = [x for x in (q, k, v, g) if x is not None]
    return (
        all(x.device.type == "cuda" and x.dtype in _DTYPES for x in given)
        and q.shape[3] <= MAX_KEY
        and v.shape[3] <= MAX_VALUE
        and triton_available()
        and _has_matrix_units(q.device)
    )
