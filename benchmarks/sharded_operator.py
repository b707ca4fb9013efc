"""What sharding costs the operator: a rank's tokens by themselves (the data-parallel bound), and as one sequence.

    torchrun --nproc-per-node 2 benchmarks/sharded_operator.py --out out/sharded_operator

The same kernels on the same tensors, forward and backward, in turns, from CUDA graphs; medians of the slowest rank with
the spread between quartiles. Two ways that split heads instead of states are there as yardsticks: "ulysses" exchanges
tokens for heads before and after (all-to-all), "all_gather" gives each rank the whole sequence of all heads, as
Megatron's sequence parallelism does, and it computes its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import microseconds, slowest

from zeco_compile import gated_linear_attention
from zeco_compile.lowering import communicator

LENGTHS = (16384, 32768)
HEADS, KEY, VALUE = 16, 128, 128
SCHEDULES = ("unsharded", "all_scan", "all_scan_tree", "lasp1", "lasp2", "ulysses", "all_gather")


class TokensForHeads(torch.autograd.Function):
    """[1, T, H, D] of this rank's tokens -> [1, W T, H / W, D] of its heads, or with ``back`` the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.back = back
        return exchanged(x, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return exchanged(grad, not ctx.back), None


def exchanged(x: torch.Tensor, back: bool) -> torch.Tensor:
    ranks = dist.get_world_size()
    if back:
        sent = x[0].unflatten(0, (ranks, -1)).contiguous()
    else:
        sent = x[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return (
        (received.transpose(0, 1) if back else received).flatten(*((1, 2) if back else (0, 1))).unsqueeze(0)
    )


class WholeSequence(torch.autograd.Function):
    """[1, T, H, D] of this rank's tokens -> [1, W T, H, D]; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty((dist.get_world_size() * x.shape[1], *x.shape[2:]))
        dist.all_gather_into_tensor(whole, x[0].contiguous())
        return whole.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        mine = grad.new_empty((grad.shape[1] // dist.get_world_size(), *grad.shape[2:]))
        dist.reduce_scatter_tensor(mine, grad[0].contiguous())
        return mine.unsqueeze(0)


def by_heads(leaves: list[torch.Tensor], gathered: bool) -> torch.Tensor:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # a gate per head has no channels
    given = [x if x.dim() == 4 else x.unsqueeze(-1) for x in leaves]
    if gathered:
        parts = [WholeSequence.apply(x).chunk(ranks, 2)[rank] for x in given]
    else:
        parts = [TokensForHeads.apply(x, False) for x in given]
    q, k, v, g = (part if x.dim() == 4 else part.squeeze(-1) for part, x in zip(parts, leaves, strict=True))
    return TokensForHeads.apply(gated_linear_attention(q, k, v, g), True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/sharded_operator"))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=SCHEDULES)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = [
        row
        for gate in ("channel", "head")
        for length in LENGTHS
        for row in measure(gate, length, arguments.rounds, ["unsharded", *arguments.schedules])
    ]
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        (arguments.out / "results.json").write_text(json.dumps(found, indent=1))
    communicator.close_all()
    dist.destroy_process_group()


def measure(gate: str, length: int, rounds: int, schedules: list[str]) -> list[dict[str, Any]]:
    schedules = list(dict.fromkeys(schedules))
    torch.manual_seed(dist.get_rank())
    q, k, v, do = (
        torch.randn(1, length, HEADS, width, device="cuda", dtype=torch.bfloat16)
        for width in (KEY, KEY, VALUE, VALUE)
    )
    width = (KEY,) if gate == "channel" else ()
    g = F.logsigmoid(torch.randn(1, length, HEADS, *width, device="cuda")) / 16
    leaves = [x.detach().requires_grad_() for x in (q, F.normalize(k, dim=-1), v, g)]
    replays = {name: captured(leaves, do, name) for name in schedules}
    times: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(microseconds(replay, 5))
    base = statistics.median(slowest(times["unsharded"]))
    rows = []
    for name in schedules:
        low, middle, high = statistics.quantiles(slowest(times[name]), n=4)
        rows.append({"gate": gate, "tokens": length, "ranks": dist.get_world_size(), "schedule": name,
                     "us": round(middle, 1), "us_low": round(low, 1), "us_high": round(high, 1),
                     "over": round(middle / base - 1, 4)})  # fmt: skip
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return rows


def captured(leaves: list[torch.Tensor], do: torch.Tensor, schedule: str) -> Callable[[], Any]:
    world = dist.group.WORLD
    assert world is not None
    group = "" if schedule == "unsharded" else world.group_name
    name = "all_scan" if schedule == "unsharded" else schedule

    def step() -> Any:
        if schedule in ("ulysses", "all_gather"):
            return torch.autograd.grad(by_heads(leaves, schedule == "all_gather"), leaves, do)
        o, _ = torch.ops.zeco.gated_linear_attention(*leaves, KEY**-0.5, None, False, name, 0, group)
        return torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


if __name__ == "__main__":
    main()
