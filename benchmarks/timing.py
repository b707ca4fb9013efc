"""How the benchmarks time what runs on a GPU, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def microseconds(run: Callable[[], Any], runs: int = 1) -> float:
    """Of one of so many runs in a row; where there are ranks, they begin together."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / runs


def slowest(times: list[float], device: torch.device | str = "cuda") -> list[float]:
    """Of all ranks, time by time."""
    everyone = torch.tensor(times, device=device, dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return everyone.tolist()
