"""Trains a byte-level language model with gated linear attention (GLA), with the sequence split over ranks.

    python examples/train_gla.py                       # the demo: one rank in eager, then 2 ranks on the CPU
    torchrun --nproc-per-node 4 examples/train_gla.py  # the training on NCCL (or on gloo without GPUs)

The first half of this file is a model as anyone would write it, in plain PyTorch, for whole sequences: it
knows nothing of ranks. ``torch.compile(model, backend="zeco")`` is all that makes it run on slices.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import queue
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

# ---- the model: plain PyTorch ----


@dataclass(frozen=True)
class Config:
    """Sizes of the model; ``key`` and ``value`` are per head."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    key: int = 16
    value: int = 32
    conv: int = 4
    vocabulary: int = 256


class CausalConv(nn.Module):
    """Short depthwise convolution along the sequence: position t sees t-3 .. t."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, size, groups=channels, padding=size - 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]]
        return F.silu(y.transpose(1, 2))


class GatedLinearAttention(nn.Module):
    """GLA (Yang et al. 2024) in its masked quadratic form: attention whose scores decay per channel."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.conv = CausalConv(c.width, c.conv)
        self.q = nn.Linear(c.width, c.heads * c.key, bias=False)
        self.k = nn.Linear(c.width, c.heads * c.key, bias=False)
        self.v = nn.Linear(c.width, c.heads * c.value, bias=False)
        self.gate = nn.Linear(c.width, c.heads * c.key)
        self.norm = nn.RMSNorm(c.value, eps=1e-5)
        self.output_gate = nn.Linear(c.width, c.heads * c.value, bias=False)
        self.out = nn.Linear(c.heads * c.value, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        q, k, v, g = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, D]
            for projection in (self.q, self.k, self.v, self.gate)
        )
        decay = (F.logsigmoid(g) / 16).cumsum(2)  # slow: a sixteenth of the usual forget gate
        scores = (q * decay.exp()) @ (k * (-decay).exp()).transpose(-1, -2) * q.shape[-1] ** -0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        o = scores.masked_fill(~causal, 0) @ v
        o = self.norm(o.transpose(1, 2)).flatten(2)
        return self.out(o * F.silu(self.output_gate(x)))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(c.width, eps=1e-5), GatedLinearAttention(c)
        self.mlp_norm, self.mlp = nn.RMSNorm(c.width, eps=1e-5), SwiGLU(c.width, 2 * c.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """``tokens`` [B, T] int64 -> the mean next-byte loss over the whole sequence."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# ---- the training ----


@dataclass(frozen=True)
class Training:
    """``batch`` sequences of ``length`` bytes a step, over all ranks together."""

    steps: int = 30
    batch: int = 4
    length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0
    dtype: str = "float32"
    codegen: str = "inductor"
    out: str = "out/demo"


def batches(training: Training) -> Iterator[Tensor]:
    """Random windows of the documentation that every Python carries (460 KB), the same in every process."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(training.seed)
    for _ in range(training.steps):
        starts = torch.randint(len(data) - training.length, (training.batch,), generator=generator).tolist()
        yield torch.stack([data[start : start + training.length] for start in starts]).long()


def new_model(training: Training) -> ByteLM:
    torch.manual_seed(training.seed)
    return ByteLM(Config()).to(getattr(torch, training.dtype))


def average_gradients(model: nn.Module) -> None:
    """What DDP does: each rank holds its part of the gradient of a loss that is equal on every rank."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(
    model: nn.Module, loss_of: Callable[[Tensor], Tensor], training: Training, device: torch.device
) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Yields (step, loss, gradients); ``loss_of`` is the model, compiled or not, on this rank's tokens."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    for step, tokens in enumerate(batches(training)):
        mine = tokens.chunk(world_size, dim=1)[rank].to(device)
        optimizer.zero_grad()
        loss = loss_of(mine)
        loss.backward()
        if world_size > 1:
            average_gradients(model)
        gradients = {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters()}
        optimizer.step()
        yield step, loss.item(), gradients


def train_sharded(training: Training) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """The training in an initialised process group, each rank on its slice of every sequence."""
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = new_model(training).to(device)
    compiled = torch.compile(
        model,
        backend="zeco",
        fullgraph=True,
        options={"codegen": training.codegen, "debug_dir": training.out},
    )
    yield from train(model, compiled, training, device)


# ---- the demo: both runs, side by side ----


@dataclass
class ShardedResult:
    """What rank 0 tells the driver at the end, beside the losses on the way."""

    losses: list[float]
    gradients: list[tuple[float, str]]  # of every step: the largest difference, and of which parameter
    regions: list[str]
    decisions: list[str]
    alternatives: dict[str, int]
    sent: list[int]


def relative_difference(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64; 0 where both are zero."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm()) if b.any() else float(a.norm())


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    return max((relative_difference(a[name], b[name]), name) for name in b)


def source(location: Any) -> str:
    return f"{Path(location.file).name}:{location.line}\n  {location.code}"


def counted(lines: Iterable[str]) -> list[str]:
    """The layers of a model do the same at the same line: each line once, with how often."""
    return [f"{n} x {line}" for line, n in Counter(lines).items()]


def demo_rank(rank: int, training: Training, ranks: int, folder: str, messages: Any) -> None:
    """One of the demo's processes; rank 0 reports to the driver."""
    from zeco_compile import last_report
    from zeco_compile.lowering import volume

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    reference = torch.load(f"{folder}/gradients.pt", mmap=True)
    result = ShardedResult([], [], [], [], {}, [])
    for step, loss, gradients in train_sharded(training):
        result.losses.append(loss)
        result.gradients.append(largest_difference(gradients, reference[step]))
        if rank == 0:
            messages.put((step, loss))
    sent: list[Any] = [None] * ranks
    dist.all_gather_object(sent, sum(volume.sent().values()) // training.steps)
    if rank == 0:
        report = last_report()
        result.sent = sent
        result.regions = counted(f"{r.family}, {r.how}, at {source(r.location)}" for r in report.regions)
        mixing = [d for d in report.decisions if d.decision != "position-local"]
        result.decisions = counted(f"{d.decision}, {d.op}, at {source(d.location)}" for d in mixing)
        for exchange in report.communication:
            for name, amount in exchange.alternatives.items():
                result.alternatives[name] = result.alternatives.get(name, 0) + amount
        messages.put(result)
    dist.destroy_process_group()


def run_eager(training: Training, folder: str, on_step: Callable[[int, float], None]) -> list[float]:
    """The unsharded run, whose gradients of every step the ranks will read."""
    torch.set_num_threads(1)  # as each rank has
    model = new_model(training)
    losses, kept = [], []
    for step, loss, gradients in train(model, model, training, torch.device("cpu")):
        losses.append(loss)
        kept.append(gradients)
        on_step(step, loss)
    torch.save(kept, f"{folder}/gradients.pt")
    return losses


def run_ranks(
    training: Training, ranks: int, folder: str, on_step: Callable[[int, float], None]
) -> ShardedResult:
    """The sharded run: starts the processes and follows them. Raises what one of them raised."""
    messages = mp.get_context("spawn").Queue()
    processes = mp.spawn(demo_rank, (training, ranks, folder, messages), nprocs=ranks, join=False)
    while True:
        try:
            message = messages.get(timeout=0.5)
        except queue.Empty:
            if processes.join(timeout=0.01):
                raise RuntimeError("the ranks ended without a result") from None
            continue
        if isinstance(message, ShardedResult):
            while not processes.join():
                pass
            return message
        on_step(*message)


def demo(training: Training, ranks: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:

        def follow(name: str, before: str) -> Callable[[int, float], None]:
            task = progress.add_task(before, total=training.steps)
            return lambda step, loss: progress.update(
                task, completed=step + 1, description=f"{name}: loss {loss:.4f}"
            )

        eager = run_eager(training, folder, follow("one rank, eager", "one rank, eager"))
        name = f"{ranks} ranks, zeco"
        sharded = run_ranks(training, ranks, folder, follow(name, f"{name}: starting and compiling"))
    print_results(console, training, ranks, eager, sharded)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def print_results(
    console: Any, training: Training, ranks: int, eager: list[float], sharded: ShardedResult
) -> None:
    from rich.table import Table

    losses = Table("step", "one rank, eager", f"{ranks} ranks, zeco", "difference", title="loss")
    for step, (a, b) in enumerate(zip(eager, sharded.losses, strict=True)):
        losses.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(losses)

    worst = max(abs(a - b) for a, b in zip(eager, sharded.losses, strict=True))
    table = Table(
        "",
        "",
        title=f"{ranks} ranks against one, {training.steps} steps in {training.dtype}",
        show_header=False,
    )
    table.add_row("largest loss difference", f"{worst:.1e}")
    # Runs that round differently drift apart; only the first step starts from the same weights.
    for title, (difference, name) in (
        ("of the first step", sharded.gradients[0]),
        ("of any step", max(sharded.gradients)),
    ):
        table.add_row(f"largest gradient difference {title}", f"{difference:.1e} of its norm ({name})")
    table.add_row("recognised as linear attention", "\n".join(sharded.regions) or "nothing")
    table.add_row("rewritten for slices", "\n".join(sharded.decisions) or "nothing")
    sent = "\n".join(f"{amount:,} B (rank {rank})" for rank, amount in enumerate(sharded.sent))
    table.add_row("sent per rank and step", sent)
    for name, amount in sharded.alternatives.items():
        table.add_row(f"by {name} instead", f"{amount:,} B")
    table.add_row("graphs before and after", str(Path(training.out).resolve()))
    console.print(table)


# ---- command line ----


def under_torchrun(training: Training) -> None:
    """The sharded training alone, on the group that torchrun describes."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    start = time.perf_counter()
    for step, loss, _ in train_sharded(training):
        if dist.get_rank() == 0:
            print(f"step {step:4d}  loss {loss:.6f}  {time.perf_counter() - start:7.1f} s", flush=True)
    dist.destroy_process_group()


def codegen_here() -> str:
    """Inductor's CPU code needs a C++ compiler; without one the same graphs run op by op."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return "inductor" if found or torch.cuda.is_available() else "aot_eager"


def main() -> None:
    launched = "RANK" in os.environ
    here = {
        "codegen": codegen_here(),
        # The demo compares two runs: in float64 rounding, which training amplifies, cannot hide a mistake.
        "dtype": "float32" if launched else "float64",
    }
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the demo (default: 2)")
    for each in fields(Training):
        default = here.get(each.name, each.default)
        name = each.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    given = vars(parser.parse_args())
    ranks = given.pop("ranks")
    training = Training(**given)
    world_size = int(os.environ.get("WORLD_SIZE", ranks))
    if training.length % world_size:
        parser.error(f"--length {training.length} cannot be shared evenly by {world_size} ranks")
    if launched:
        under_torchrun(training)
    else:
        demo(training, ranks)


if __name__ == "__main__":
    main()
