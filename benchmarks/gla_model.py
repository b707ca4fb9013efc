"""Training steps of a 1B GLA language model: data parallel, and as one sequence over all ranks with backend="zeco".

    torchrun --nproc-per-node 2 benchmarks/gla_model.py --out out/gla_model
    torchrun --nproc-per-node 2 benchmarks/gla_model.py --device cpu --layers 2 --width 64 --tokens 128 --vocabulary 256

Data parallel means: each rank trains on a sequence of its own, compiled by plain Inductor; the bound that sharding is
measured against. Forward, loss, backward, no gradient exchange and no optimizer, which are the same for both. Prints
and writes tokens a second and GPU, the compile time, the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile import gated_linear_attention


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out_gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, width))
        self.out_norm, self.out = nn.RMSNorm(width // heads), nn.Linear(width, width, bias=False)
        inner = 8 * width // 3 // 64 * 64
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(h).chunk(3, -1))
        g = F.logsigmoid(self.gate(h).float()).unflatten(-1, (self.heads, -1)) / 16
        o = gated_linear_attention(q, k, v, g)
        x = x + self.out(self.out_norm(o).flatten(-2) * F.silu(self.out_gate(h)))
        value, gate = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/gla_model"))
    parser.add_argument("--device", default="cuda")
    for name, default in (
        ("layers", 20),
        ("width", 2048),
        ("heads", 16),
        ("tokens", 16384),
        ("vocabulary", 32000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--schedules", nargs="+", default=["data parallel", "all_scan", "lasp2"])
    arguments = parser.parse_args()
    device = torch.device(
        arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else 0
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(arguments.layers, arguments.width, arguments.heads, arguments.vocabulary).to(device, dtype)
    torch.manual_seed(1 + dist.get_rank())
    tokens, labels = (
        torch.randint(arguments.vocabulary, (1, arguments.tokens), device=device) for _ in range(2)
    )
    rows = [measure(model, tokens, labels, schedule, arguments.rounds) for schedule in arguments.schedules]
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        parameters = sum(p.numel() for p in model.parameters())
        found = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch": torch.__version__,
                 "ranks": dist.get_world_size(), "parameters": parameters, "tokens": arguments.tokens,
                 "layers": arguments.layers, "width": arguments.width, "rows": rows}  # fmt: skip
        (arguments.out / "results.json").write_text(json.dumps(found, indent=1))
        base = rows[0]["tokens_a_second"]
        for row in rows:
            speed = row["tokens_a_second"]
            print(f"{row['schedule']}: {speed:.0f} tokens/s/GPU ({speed / base:.3f}), compiled in "
                  f"{row['compile_s']:.1f} s, peak {row['peak_gib']:.1f} GiB", flush=True)  # fmt: skip
    dist.destroy_process_group()


def measure(model: nn.Module, tokens: Tensor, labels: Tensor, schedule: str, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    if schedule == "data parallel":
        compiled = torch.compile(model, fullgraph=True)
    else:
        compiled = torch.compile(model, backend="zeco", fullgraph=True, options={"schedule": schedule})
    on_gpu = tokens.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        compiled(tokens, labels).backward()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()

    dist.barrier()
    begin = time.perf_counter()
    step()
    compile_s = time.perf_counter() - begin
    step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, device=tokens.device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    low, middle, high = statistics.quantiles(slowest.tolist(), n=4)
    row = {"schedule": schedule, "step_s": middle, "step_s_low": low, "step_s_high": high, "compile_s": compile_s,
           "tokens_a_second": tokens.shape[1] / middle,
           "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")}  # fmt: skip
    if dist.get_rank() == 0:
        print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
