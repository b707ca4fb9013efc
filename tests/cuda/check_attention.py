"""Checks gated linear attention over real ranks against the float64 recurrence, on GPUs or on the CPU.

    torchrun --nproc-per-node 2 tests/cuda/check_attention.py

Every schedule, eager and compiled, forward and every gradient on each rank. NCCL where every rank has a GPU
of its own, else gloo on the CPU; works with one rank too. Prints a PASS or FAIL line for each case, and
leaves with 1 if one failed. Times of the scan alone follow on CUDA.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.lowering import communicator, in_flight

BATCH, LENGTH, HEADS, KEY, VALUE = 2, 37, 3, 32, 16
SCHEDULES = [("all_scan", 1), ("all_scan", 4), ("all_scan_tree", 0), ("lasp1", 0), ("lasp2", 0), ("auto", 0)]
GATES = ["none", "constant", "head", "channel"]


def main() -> int:
    rank, device = _start()
    failed = 0
    cases = [
        (gate, schedule, blocks, how, dtype)
        for gate in GATES
        for schedule, blocks in SCHEDULES
        for how, dtype in (("eager", torch.float64), ("eager", torch.float32))
    ]
    for how in ("aot_eager", "inductor"):
        cases += [("channel", *SCHEDULES[1], how, torch.float64), ("head", *SCHEDULES[2], how, torch.float32)]
    cases.append(("channel", "all_scan", 4, "eager", torch.bfloat16))
    for case in cases:
        failed += _report(rank, device, f"{case[0]} gate, {case[1]} {case[2]}, {case[3]}, {case[4]}",
                          lambda case=case: _one_layer(rank, device, *case), case[4])  # fmt: skip
    failed += _report(rank, device, "four layers, forward and reverse in flight together",
                      lambda: _in_flight_together(rank, device), torch.float64)  # fmt: skip
    failed += _report(rank, device, "repeated without synchronising", lambda: _repeated(rank, device),
                      torch.float64)  # fmt: skip
    if device.type == "cuda":
        _times(rank, device)
    if rank == 0:
        print("ALL PASS" if not failed else f"{failed} FAILED", flush=True)
    communicator.close_all()
    dist.destroy_process_group()
    return 1 if failed else 0


def _start() -> tuple[int, torch.device]:
    local, ranks_here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timeout)
    else:
        dist.init_process_group(
            "nccl" if on_gpus else "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, torch {torch.__version__}", flush=True)
    return dist.get_rank(), device


def _report(
    rank: int, device: torch.device, title: str, check: Callable[[], dict[str, float]], dtype: torch.dtype
) -> int:
    """Runs a check on every rank and prints one line for all; 1 if it failed anywhere."""
    limit = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    errors = check()
    names = sorted(errors)
    worst = torch.tensor([errors[name] for name in names], dtype=torch.float64, device=device)
    # NaN must not get lost in a maximum
    worst = torch.nan_to_num(worst, nan=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    values = dict(zip(names, worst.tolist(), strict=True))
    good = all(value <= limit for value in values.values()) and in_flight.pending() == 0
    if rank == 0:
        detail = " ".join(f"{name} {value:.1e}" for name, value in values.items())
        print(f"{'PASS' if good else 'FAIL'}  {title}: {detail}", flush=True)
    return 0 if good else 1


def _inputs(gate: str, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole sequence, float64 numbers that ``dtype`` can hold; gates differ by head and decay slowly."""
    draw = torch.Generator().manual_seed(seed)
    length = LENGTH * dist.get_world_size()
    full = {
        "q": torch.randn(BATCH, length, HEADS, KEY, generator=draw, dtype=torch.float64),
        "k": torch.randn(BATCH, length, HEADS, KEY, generator=draw, dtype=torch.float64),
        "v": torch.randn(BATCH, length, HEADS, VALUE, generator=draw, dtype=torch.float64),
        "initial_state": torch.randn(BATCH, HEADS, KEY, VALUE, generator=draw, dtype=torch.float64),
        "do": torch.randn(BATCH, length, HEADS, VALUE, generator=draw, dtype=torch.float64),
        "dfinal": torch.randn(BATCH, HEADS, KEY, VALUE, generator=draw, dtype=torch.float64),
    }
    per_head = torch.linspace(0.2, 3.0, HEADS, dtype=torch.float64)
    if gate == "constant":
        full["g"] = -0.01 * per_head
    elif gate != "none":
        width = () if gate == "head" else (KEY,)
        noise = torch.rand(BATCH, length, HEADS, *width, generator=draw, dtype=torch.float64)
        full["g"] = -0.02 * noise * (per_head if gate == "head" else per_head.unsqueeze(-1))
    return {name: value.to(dtype).double() for name, value in full.items()}


def _one_layer(
    rank: int, device: torch.device, gate: str, schedule: str, blocks: int, how: str, dtype: torch.dtype
) -> dict[str, float]:
    full = _inputs(gate, dtype)
    expected = _reference(full)
    rows = slice(rank * LENGTH, (rank + 1) * LENGTH)
    along = {"q", "k", "v", "do"} | ({"g"} if gate in ("head", "channel") else set())
    mine = {
        name: (value[:, rows] if name in along else value).to(device, dtype) for name, value in full.items()
    }
    leaves = {n: mine[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "initial_state") if n in mine}
    layer = _layer(schedule, blocks)
    if how != "eager":
        layer = torch.compile(layer, backend=how, fullgraph=True, dynamic=True)
    q, k, v, initial = (leaves[n] for n in ("q", "k", "v", "initial_state"))
    o, final = layer(q, k, v, leaves.get("g"), initial)
    torch.autograd.backward([o, final], [mine["do"], mine["dfinal"].to(final.dtype)])
    got = {"o": o, "final": final, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    errors = {}
    for name, value in got.items():
        reference = expected[name]
        local = value.detach().double().cpu()
        if name == "dg" and gate == "constant":
            # a gate that every rank holds: the ranks' parts add up
            total = value.detach().double()
            dist.all_reduce(total)
            local = total.cpu()
        elif name == "dinitial_state":
            reference = reference if rank == 0 else torch.zeros_like(reference)
        elif name != "final" and reference.shape[1] != local.shape[1]:
            reference = reference[:, rows]
        size = max(1.0, float(expected[name].abs().max()))
        errors[name] = float((local - reference).abs().max()) / size
    return errors


def _layer(schedule: str, blocks: int) -> Callable:
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name

    def layer(q, k, v, g, initial_state):
        return torch.ops.zeco.gated_linear_attention(
            q, k, v, g, 0.25, initial_state, True, schedule, blocks, name
        )

    return layer


def _reference(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {n: full[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "initial_state") if n in full}
    q, k, v, initial = (leaves[n] for n in ("q", "k", "v", "initial_state"))
    g = leaves.get("g")
    if g is not None and g.dim() == 1:
        g = g.expand(q.shape[:3])
    o, final = recurrent_gated_linear_attention(
        q, k, v, g, scale=0.25, initial_state=initial, output_final_state=True
    )
    assert final is not None
    # every rank gives the final state a gradient, and they add up
    torch.autograd.backward([o, final], [full["do"], full["dfinal"] * dist.get_world_size()])
    return {"o": o.detach(), "final": final.detach(), **{f"d{n}": leaf.grad for n, leaf in leaves.items()}}


def _sequential(states: torch.Tensor, decays: torch.Tensor, reverse: bool) -> list[torch.Tensor]:
    order = list(range(len(states)))
    state_in, out = torch.zeros_like(states[0]), [states[0]] * len(states)
    for p in reversed(order) if reverse else order:
        out[p] = state_in
        state_in = decays[p].exp().unsqueeze(-1) * state_in + states[p]
    return out


def _in_flight_together(rank: int, device: torch.device, rounds: int = 1) -> dict[str, float]:
    """Forward and reverse scans of four layers started before any is waited for, memory reused at once."""
    world = dist.group.WORLD
    assert world is not None
    name, size = world.group_name, dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    worst = 0.0
    differences = []
    for _ in range(rounds):
        started = []
        for _ in range(4):
            states = torch.randn(size, 1, 4, 64, 32, generator=draw, dtype=torch.float64).to(device)
            decays = -torch.rand(size, 1, 4, 64, generator=draw, dtype=torch.float64).to(device)
            for reverse in (False, True):
                state, decay = states[rank].clone(), decays[rank].clone()
                token = torch.ops.zeco.scan_start(state, decay, None, reverse, "all_scan", 4, name)
                started.append((token, state, decay, _sequential(states, decays, reverse)[rank]))
        for token, state, decay, reference in started:
            got = torch.ops.zeco.scan_wait(token, state, decay, name)
            differences.append((got - reference).abs().max())
            got.fill_(float("nan"))
    worst = float(torch.stack(differences).max())
    return {"S_in": worst}


def _repeated(rank: int, device: torch.device) -> dict[str, float]:
    return _in_flight_together(rank, device, rounds=25)


def _times(rank: int, device: torch.device) -> None:
    """The scan alone, start and wait, host and device: median of 30, for a state of 4 MiB."""
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    state = torch.randn(1, 64, 128, 128, device=device)
    decay = -torch.rand(1, 64, 128, device=device)
    for schedule, blocks in SCHEDULES[:-1]:
        taken = []
        for number in range(40):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            token = torch.ops.zeco.scan_start(state, decay, None, False, schedule, blocks, name)
            torch.ops.zeco.scan_wait(token, state, decay, name)
            torch.cuda.synchronize()
            if number >= 10:
                taken.append(time.perf_counter() - start)
        if rank == 0:
            middle = sorted(taken)[len(taken) // 2] * 1e6
            print(f"TIME  {schedule} {blocks}: {middle:.0f} us, {state.nbytes / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
