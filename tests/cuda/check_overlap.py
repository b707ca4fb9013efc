"""Checks the order of compiled layers as executed on real ranks, and their numbers, on GPUs or on the CPU.

    torchrun --nproc-per-node 2 tests/cuda/check_overlap.py

Two layers with halos and output gates, training and inference, with and without code generation, several
steps one after the other without synchronising. NCCL where every rank has a GPU of its own, else gloo on the
CPU. Prints a PASS or FAIL line for each case, and leaves with 1 if one failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from zeco_compile import codegen
from zeco_compile.lowering import communicator, op_log
from zeco_compile.settings import Settings

FORWARD = ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]
BACKWARD = ["rank_dstate", "scan_start reverse", "diagonal_backward", "scan_wait", "combine_backward"]
LENGTH, HEADS, WIDTH = 300, 4, 32
STEPS = 6


def main() -> int:
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    failed = 0
    for kind in ("aot_eager", "inductor"):
        for overlap in (True, False):
            for train in (True, False):
                problem = _check(device, kind, overlap, train)
                failed += bool(problem)
                if dist.get_rank() == 0 or problem:
                    title = f"{kind}, overlap {overlap}, {'training' if train else 'inference'}"
                    print("FAIL" if problem else "PASS", f"{title} {problem}", flush=True)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_backend()}, {failed} failed", flush=True)
    communicator.close_all()
    dist.destroy_process_group()
    return 1 if failed else 0


def _check(device: torch.device, kind: Any, overlap: bool, train: bool) -> str:
    group = dist.group.WORLD.group_name
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = Settings(codegen=kind, overlap=overlap, group=group, rank=rank, world_size=world_size)
    torch._dynamo.reset()
    compiled = torch.compile(
        _two_layers, backend=lambda gm, inputs: codegen.generate(gm, inputs, settings), fullgraph=True
    )
    draw = torch.Generator().manual_seed(1)
    w = (torch.randn(2, 6, WIDTH, WIDTH, generator=draw, dtype=torch.float64) / WIDTH**0.5).to(device)
    w.requires_grad_(train)
    xs = [torch.randn(1, LENGTH, HEADS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(STEPS)]
    xs = [x.to(device) + rank for x in xs]
    try:
        expected = [_step(_two_layers, x, w, group, train)[0] for x in xs]
        _step(compiled, xs[0], w, group, train)
        results = [_step(compiled, x, w, group, train) for x in xs]
    except Exception:
        return traceback.format_exc()
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for (values, _, _), wanted in zip(results, expected, strict=True)
        for a, b in zip(values, wanted, strict=True)
    )
    if not worst < 1e-10:
        return f"differs from eager by {worst}"
    for _, forward, backward in results if overlap else ():
        if [name for name in forward if name != "halo"] != FORWARD * 2:
            return f"forward ran as {forward}"
        if train and [name for name in backward if name != "halo_backward"] != BACKWARD * 2:
            return f"backward ran as {backward}"
    return ""


def _two_layers(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    zeco = torch.ops.zeco
    for layer in range(2):
        q, k, v, g, gate = (x @ w[layer, part] for part in range(5))
        q, k, v = (
            zeco.halo(each.flatten(2), 1, 2, 0, 0.0, group)[:, 2:].view(each.shape).sin()
            for each in (q, k, v)
        )
        o, _ = zeco.gated_linear_attention(
            q, k, v, -0.1 * g.sigmoid(), 0.5, None, False, "all_scan", 2, group
        )
        x = x + (o * gate.sigmoid()).sin() @ w[layer, 5]
    return x


def _step(function: Any, x: torch.Tensor, w: torch.Tensor, group: str, train: bool) -> Any:
    with op_log.recording() as log, torch.set_grad_enabled(train):
        out = function(x, w, group)
        after = len(log)
        grads = torch.autograd.grad(out.square().sum(), [w]) if train else ()
    forward = [name for name in log[:after] if not name.endswith("done")]
    backward = [name for name in log[after:] if not name.endswith("done")]
    return (out.detach(), *grads), forward, backward


if __name__ == "__main__":
    sys.exit(main())
