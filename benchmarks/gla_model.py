"""Training steps of a 1B GLA language model: data parallel, and as one sequence over all ranks with backend="zeco".

    torchrun --nproc-per-node 2 benchmarks/gla_model.py --out out/gla_model
    torchrun --nproc-per-node 2 benchmarks/gla_model.py --heads 4 --key 256 --value 512     the published head layout
    torchrun --nproc-per-node 2 benchmarks/gla_model.py --checkpoint --tokens 131072        activations made again
    torchrun --nproc-per-node 2 benchmarks/gla_model.py --schedules all_scan --trace        one step's timeline
    torchrun --nproc-per-node 2 benchmarks/gla_model.py --device cpu --layers 2 --width 64 --heads 4 --key 16 \\
        --value 16 --tokens 128 --vocabulary 256
    python benchmarks/gla_model.py --plot FILE.json --out FOLDER    draws FOLDER/gla_model.png from results

Data parallel means: each rank trains on a sequence of its own, compiled by plain Inductor; the bound that sharding is
measured against. Forward, loss, backward, no gradient exchange and no optimizer, which are the same for both. Writes
tokens a second and GPU, the time to compile and the peak memory of each to results.json and results.md; with --trace
also a picture of one step of the last schedule, timeline.svg, with the share of All-Scan that nothing hides. Compiled
in the order of --schedules: what comes first also pays for what PyTorch loads once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import slowest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeco_compile import gated_linear_attention, timeline


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, key: int, value: int) -> None:
        super().__init__()
        self.heads, self.widths = heads, [heads * key, heads * key, heads * value]
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.widths), bias=False)
        self.out_gate = nn.Linear(width, heads * value, bias=False)
        self.gate = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, heads * key))
        self.out_norm, self.out = nn.RMSNorm(value), nn.Linear(heads * value, width, bias=False)
        inner = 8 * width // 3 // 64 * 64
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(h).split(self.widths, -1))
        g = F.logsigmoid(self.gate(h).float()).unflatten(-1, (self.heads, -1)) / 16
        o = gated_linear_attention(q, k, v, g)
        x = x + self.out(self.out_norm(o).flatten(-2) * F.silu(self.out_gate(h)))
        value, gate = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, key: int = 0, value: int = 0,
        checkpointed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        key, value = key or width // heads, value or width // heads
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, key, value) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
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
        ("key", 128),
        ("value", 128),
        ("tokens", 16384),
        ("vocabulary", 32000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--checkpoint", action="store_true", help="make each layer's activations again")
    parser.add_argument("--trace", action="store_true", help="draw a step's timeline")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--schedules", nargs="+", default=["data parallel", "all_scan", "lasp2"])
    arguments = parser.parse_args()
    if arguments.plot is not None:
        print(plot(json.loads(arguments.plot.read_text()), arguments.out))
        return
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
    model = Model(
        arguments.layers, arguments.width, arguments.heads, arguments.vocabulary, arguments.key, arguments.value,
        arguments.checkpoint,
    ).to(device, dtype)  # fmt: skip
    torch.manual_seed(1 + dist.get_rank())
    tokens, labels = (
        torch.randint(arguments.vocabulary, (1, arguments.tokens), device=device) for _ in range(2)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    last = arguments.schedules[-1]
    rows = [
        measure(
            model, tokens, labels, schedule, arguments.rounds,
            arguments.out if arguments.trace and schedule == last else None,
        )
        for schedule in arguments.schedules
    ]  # fmt: skip
    if dist.get_rank() == 0:
        names = ("tokens", "layers", "width", "heads", "key", "value", "checkpoint")
        found = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "parameters": sum(p.numel() for p in model.parameters()),
            **{name: getattr(arguments, name) for name in names},
            "rows": rows,
        }
        (arguments.out / "results.json").write_text(json.dumps(found, indent=1))
        (arguments.out / "results.md").write_text(markdown(found))
        print(markdown(found), flush=True)
    dist.destroy_process_group()


def measure(
    model: nn.Module, tokens: Tensor, labels: Tensor, schedule: str, rounds: int, trace: Path | None = None
) -> dict[str, Any]:
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
    if trace is not None:
        draw_step(step, trace)
    low, middle, high = statistics.quantiles(slowest(times, tokens.device), n=4)
    row = {"schedule": schedule, "step_s": middle, "step_s_low": low, "step_s_high": high, "compile_s": compile_s,
           "tokens_a_second": tokens.shape[1] / middle,
           "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")}  # fmt: skip
    if dist.get_rank() == 0:
        print(row, flush=True)
    return row


def draw_step(step: Callable[[], None], folder: Path) -> None:
    """One step of every rank as a picture, and the times in it as JSON."""
    traces = [folder / f"trace{rank}.json.gz" for rank in range(dist.get_world_size())]
    # to start a profiler takes each rank another time, which would show as waiting: one step first, then all together
    mine = str(traces[dist.get_rank()])
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(mine),
    ) as profile:
        for _ in range(2):
            dist.barrier()
            step()
            profile.step()
    dist.barrier()
    if dist.get_rank() == 0:
        timeline.main([*map(str, traces), "--out", str(folder / "timeline.svg")])


def markdown(found: dict[str, Any]) -> str:
    rows = found["rows"]
    base = next((row for row in rows if row["schedule"] == "data parallel"), rows[0])
    lines = [
        f"{found['ranks']} x {found['device']}, torch {found['torch']}: {found['parameters'] / 1e9:.2f}B parameters, "
        f"{found['tokens']} tokens a rank, {found['heads']} heads of K={found['key']} V={found['value']}"
        + (", checkpointed layers" if found["checkpoint"] else ""),
        "",
        f"| | step, ms (quartiles) | tokens/s/GPU | of {base['schedule']} | compiled in, s | peak, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['schedule']} | {row['step_s'] * 1e3:.1f} ({row['step_s_low'] * 1e3:.1f} to "
            f"{row['step_s_high'] * 1e3:.1f}) | {row['tokens_a_second']:.0f} | "
            f"{row['tokens_a_second'] / base['tokens_a_second']:.3f} | {row['compile_s']:.1f} | {row['peak_gib']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = found["rows"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    names = [row["schedule"] for row in rows]
    spread = [
        [row["step_s"] - row["step_s_low"] for row in rows],
        [row["step_s_high"] - row["step_s"] for row in rows],
    ]
    axes[0].bar(
        names, [row["step_s"] * 1e3 for row in rows], yerr=[[1e3 * x for x in side] for side in spread]
    )
    axes[0].set_title("a training step, ms (quartiles)", fontsize=9)
    axes[1].bar(names, [row["compile_s"] for row in rows])
    axes[1].set_title("time to compile, s", fontsize=9)
    axes[2].bar(names, [row["peak_gib"] for row in rows])
    axes[2].set_title("peak memory, GiB", fontsize=9)
    for each in axes:
        each.tick_params(labelsize=8)
        each.grid(alpha=0.3, axis="y")
    figure.suptitle(markdown(found).partition("\n")[0], fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "gla_model.png", dpi=140)
    return folder / "gla_model.png"


if __name__ == "__main__":
    main()
