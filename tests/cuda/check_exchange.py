"""Checks the exchanges along the sequence over real ranks, on GPUs or on the CPU.

    torchrun --nproc-per-node 2 tests/cuda/check_exchange.py

Every op of ``zeco_compile.lowering.exchange`` against the same thing on the whole sequence in one process,
values and gradients, in several dtypes and layouts; all of them together compiled with a symbolic length; the
checks of agreement next to them. NCCL where every rank has a GPU of its own, else gloo on the CPU. Prints a
PASS or FAIL line for each case, and leaves with 1 if one failed. With the argument ``staged`` all ranks share
the first GPU, and its tensors go over gloo.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from zeco_compile.lowering import agreement, communicator, exchange, halo
from zeco_compile.lowering.errors import UnequalShards
from zeco_compile.lowering.groups import resolve_group
from zeco_compile.sequence import gather_sequence, shard_sequence


def _cpu_tests() -> Any:
    path = Path(__file__).parents[1] / "lowering" / "test_exchange.py"
    spec = importlib.util.spec_from_file_location("exchange_on_the_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


whole = _cpu_tests()


def main() -> int:
    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    staged = sys.argv[1:] == ["staged"]
    on_gpus = torch.cuda.is_available() and (staged or torch.cuda.device_count() >= ranks_here)
    device = torch.device("cuda", 0 if staged else local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus and not staged else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    failed = 0
    for dtype in whole.DTYPES:
        for layout in ("plain", "reversed", "every other"):
            cases = _cases(dtype, layout, world_size)
            failed += _report(f"{dtype} {layout}", lambda cases=cases: _compare(rank, device, cases))
    failed += _report("maximum keeps NaN", lambda: _maximum(rank, device, world_size))
    for backend in ("aot_eager", "inductor"):
        failed += _report(f"compiled, {backend}", lambda b=backend: _compiled(rank, device, world_size, b))
    failed += _report("there and back", lambda: _there_and_back(rank, device, world_size))
    failed += _report("unequal lengths", lambda: _unequal(rank))
    failed += _report("queued without synchronising", lambda: _queued(rank, device, world_size))
    if rank == 0:
        _times(device)
        print("ALL PASS" if not failed else f"{failed} FAILED", flush=True)
    else:
        _times(device)
    communicator.close_all()
    dist.destroy_process_group()
    return 1 if failed else 0


def _report(name: str, check: Callable[[], None]) -> int:
    problem = ""
    try:
        check()
    except Exception:
        problem = traceback.format_exc()
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if dist.get_rank() == 0:
        print(f"{'FAIL' if any(problems) else 'PASS'} {name}", flush=True)
        for rank, text in enumerate(problems):
            if text:
                print(f"  rank {rank}: {text}", flush=True)
    return int(any(problems))


def _whole_flip(xs: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    return list(torch.cat(xs, dim).flip(dim).chunk(len(xs), dim))


whole.WHOLE["flip_sequence"] = _whole_flip


def _cases(dtype: torch.dtype, layout: str, world_size: int) -> list[tuple]:
    shape = (world_size, 3 * world_size, 2 * world_size)
    asked: list[tuple[str, tuple]] = []
    for dim in (0, 1, -1):
        fill = 1.0 if dtype == torch.bool else -100.0
        asked += [("halo", (dim, 3, 0, fill)), ("halo", (dim, 0, 1, fill)), ("halo", (dim, 9, 7, fill))]
        asked += [
            (op, (dim,)) for op in ("gather_sequence", "slice_sequence", "unslice_sequence", "flip_sequence")
        ]
        if dtype != torch.bool:
            asked.append(("scatter_sum", (dim,)))
    asked.append(("from_rank", (world_size - 1,)))
    if dtype != torch.bool:
        asked += [("all_sum", ()), ("sum_to_rank", (0,))]
    return [whole._case(op, args, shape, world_size, dtype, layout) for op, args in asked]


def _compare(rank: int, device: torch.device, cases: list[tuple]) -> None:
    group = resolve_group()
    for (op, xs, weights, args, layout), (ys, gradients) in cases:
        x = whole._strided(xs[rank].to(device), layout)
        found, expected = [], [ys[rank]]
        if weights is not None:
            x.requires_grad_()
            expected.append(gradients[rank])
        y = getattr(torch.ops.zeco, op)(x, *args, group)
        found.append(y.detach())
        if weights is not None:
            found += torch.autograd.grad(y, x, whole._strided(weights[rank].to(device), layout))
        for mine, right in zip(found, expected, strict=True):
            assert mine.device == device
            assert mine.dtype == xs[rank].dtype
            if mine.dtype.is_floating_point:
                tolerance = whole.TOLERANCE[mine.dtype]
                assert torch.allclose(mine.cpu().double(), right.double(), tolerance, tolerance), (op, args)
            else:
                assert torch.equal(mine.cpu(), right), (op, args)


def _maximum(rank: int, device: torch.device, world_size: int) -> None:
    x = torch.full((3,), float(rank), device=device)
    if rank == 0:
        x[1] = float("nan")
    largest = exchange.all_max(x, resolve_group())
    assert largest[0] == world_size - 1
    assert largest[1].isnan()


def _compiled(rank: int, device: torch.device, world_size: int, backend: str) -> None:
    group = resolve_group()
    torch._dynamo.reset()
    compiled = torch.compile(whole._everything, backend=backend, fullgraph=True)
    for length in (6, 3, 11):
        generator = torch.Generator().manual_seed(10 * length + rank)
        x = torch.randn(3, length, 2, generator=generator, dtype=torch.float64).to(device).transpose(0, 2)
        labels = torch.randint(0, 9, (2, length), generator=generator).to(device)
        results = []
        for run in (whole._everything, compiled):
            leaf = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, 1)
            torch._dynamo.mark_dynamic(labels, 1)
            *outputs, targets = run(leaf, labels, group, world_size)
            weights = [torch.linspace(-1, rank + 1, y.numel(), device=device).view_as(y) for y in outputs]
            weights = [weight.to(y.dtype) for weight, y in zip(weights, outputs, strict=True)]
            results.append([*outputs, targets, *torch.autograd.grad(outputs, leaf, weights)])
        for eager, mine in zip(*results, strict=True):
            assert (eager - mine).abs().max() < 1e-11


def _there_and_back(rank: int, device: torch.device, world_size: int) -> None:
    full = torch.randn(2, 4 * world_size, 3, generator=torch.Generator().manual_seed(0)).to(device)
    full.requires_grad_()
    back = gather_sequence(shard_sequence(full))
    assert torch.equal(back, full)
    (gradient,) = torch.autograd.grad(back.sum(), full)
    assert torch.equal(gradient[:, 4 * rank : 4 * rank + 4], torch.full((2, 4, 3), world_size, device=device))
    assert gradient.sum() == 24 * world_size


def _unequal(rank: int) -> None:
    try:
        agreement.check_lengths(resolve_group(), (5 + rank,))
    except UnequalShards:
        return
    assert dist.get_world_size() == 1, "nothing was raised"


def _queued(rank: int, device: torch.device, world_size: int) -> None:
    """Buffers that are freed and reused at once, while their transfers may still be under way."""
    group = resolve_group()
    x = torch.full((64, 4096), float(rank), device=device)
    for step in range(50):
        x = halo.halo(x + 1, 0, 64, 0, float(step), group)[:64]
    # rank 0 takes the last step's fill; rank p the rows that rank p-1 had a step before, and one more
    expected = 49.0
    assert (x == expected).all(), (x.min(), x.max(), expected)


def _times(device: torch.device) -> None:
    group = resolve_group()
    x = torch.randn(1, 16384, 2048, device=device, dtype=torch.bfloat16)
    small = torch.randn(64, device=device)
    for name, run in [
        ("check_lengths", lambda: agreement.check_lengths(group, (16384,))),
        ("halo, 3 rows of 2048 bf16 beside 16384", lambda: halo.halo(x, 1, 3, 0, 0.0, group)),
        ("all_sum of 64", lambda: exchange.all_sum(small, group)),
        ("from_rank of 64", lambda: exchange.from_rank(small, 0, group)),
    ]:
        times = []
        for _ in range(60):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"{name}: median {1e6 * sorted(times)[30]:.0f} µs", flush=True)


if __name__ == "__main__":
    sys.exit(main())
