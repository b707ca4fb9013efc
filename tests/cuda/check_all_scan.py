"""Checks All-Scan through shared memory between real GPUs, in a CUDA graph too, and what a lost rank comes to.

    torchrun --nproc-per-node 2 tests/cuda/check_all_scan.py

Prints a PASS or FAIL line for each case, and leaves with 1 if one failed.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from zeco_compile.lowering import communicator, symmetric
from zeco_compile.lowering.errors import NeighbourLost

SHAPES = [(1, 16, 128, 128), (2, 3, 5, 7), (1, 1, 1, 1), (1, 64, 128, 128), (1, 4, 256, 512)]


def main() -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name
    shared = symmetric.scan_for(group, device)
    results = [("symmetric memory is used", shared is not None)]
    if shared is not None:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.float64):
                results.append((f"{shape} {dtype}", scans_are_right(group, device, shape, dtype)))
        results.append(("a CUDA graph, replayed with other numbers", graph_is_right(group, device)))
        results.append(("a training step in a CUDA graph", step_in_graph(group, device)))
        results.append(("a lost rank is named in time", lost_rank(device)))
    failed = 0
    for title, good in results:
        verdict = torch.tensor([int(not good)], device=device)
        dist.all_reduce(verdict)
        failed += int(verdict.item() > 0)
        if dist.get_rank() == 0:
            print(f"{'FAIL' if verdict.item() else 'PASS'}  {title}", flush=True)
    if dist.get_rank() == 0:
        print("ALL PASS" if not failed else f"{failed} FAILED", flush=True)
    communicator.close_all()
    dist.destroy_process_group()
    return 1 if failed else 0


def draw(device, shape, dtype, seed):
    """States, decays of all ranks, what enters, S_in of each rank forward and back."""
    generator = torch.Generator().manual_seed(seed)
    size = dist.get_world_size()
    states = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    decays = -torch.rand(size, *shape[:3], generator=generator, dtype=torch.float64)
    boundary = torch.randn(shape, generator=generator, dtype=torch.float64)
    expected = []
    for order in (range(size), reversed(range(size))):
        carried, found = boundary, {}
        for rank in order:
            found[rank] = carried
            carried = decays[rank].exp().unsqueeze(-1) * carried + states[rank]
        expected.append(found[dist.get_rank()])
    to = {"device": device, "dtype": dtype}
    return states[dist.get_rank()].to(**to), decays[dist.get_rank()].to(**to), boundary.to(**to), expected


def scan(group, state, decay, boundary, reverse):
    token = torch.ops.zeco.scan_start(state, decay, boundary, reverse, "all_scan", 0, group)
    return torch.ops.zeco.scan_wait(token, state, decay, group)


def close(got, expected) -> bool:
    limit = 1e-12 if got.dtype == torch.float64 else 1e-5
    return bool(
        ((got.double().cpu() - expected).abs().max() <= limit * expected.abs().max().clamp(min=1)).item()
    )


def scans_are_right(group, device, shape, dtype) -> bool:
    outcomes = []
    for seed in range(6):
        state, decay, boundary, expected = draw(device, shape, dtype, seed)
        for reverse in (False, True):
            got = scan(group, state, decay, boundary, reverse)
            outcomes.append((got, expected[int(reverse)]))
    return all(close(got, wanted) for got, wanted in outcomes)


def graph_is_right(group, device) -> bool:
    shape = SHAPES[0]
    state, decay, boundary, _ = draw(device, shape, torch.float32, 0)
    for reverse in (False, True):
        scan(group, state, decay, boundary, reverse)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [scan(group, state, decay, boundary, reverse) for reverse in (False, True, False)]
    good = True
    for seed in range(1, 8):
        new_state, new_decay, new_boundary, expected = draw(device, shape, torch.float32, seed)
        for old, new in ((state, new_state), (decay, new_decay), (boundary, new_boundary)):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        good = good and all(close(outputs[n], expected[n % 2]) for n in range(3))
    return good


def step_in_graph(group, device) -> bool:
    """Forward and backward of two layers, captured, against the same run as it is."""
    torch.manual_seed(dist.get_rank())
    inputs = [
        torch.randn(1, 512, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    gate = torch.nn.functional.logsigmoid(torch.randn(1, 512, 4, 64, device=device)).requires_grad_()

    def step():
        o = inputs[2]
        for _ in range(2):
            o, _ = torch.ops.zeco.gated_linear_attention(
                inputs[0], inputs[1], o, gate, 0.1, None, False, "all_scan", 0, group
            )
        return torch.autograd.grad(o.float().square().sum(), [*inputs, gate])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            plain = step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


def lost_rank(device) -> bool:
    """The first rank does not come to a second scan: the others say so within the group's timeout, and go on."""
    seconds = 4.0
    group = dist.new_group(
        backend="nccl", timeout=datetime.timedelta(seconds=seconds), device_id=device
    ).group_name
    state, decay, boundary, _ = draw(device, SHAPES[0], torch.float32, 0)
    scan(group, state, decay, boundary, False)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        time.sleep(seconds + 4)
        return True
    began = time.perf_counter()
    got = scan(group, state, decay, boundary, False)
    torch.cuda.synchronize()
    waited = time.perf_counter() - began
    try:
        scan(group, state, decay, boundary, False)
    except NeighbourLost as error:
        named = error.neighbour == dist.get_rank() - 1 and f"global rank {dist.get_rank() - 1}" in str(error)
        return named and bool(got.isnan().all()) and waited < seconds + 2
    return False


if __name__ == "__main__":
    sys.exit(main())
