"""The local operator beside flash-linear-attention's, on one GPU, in one process, turn by turn.

    python benchmarks/gla_operator.py --out out/gla_operator          times, and writes results.json and results.md
    python benchmarks/gla_operator.py --plot FILE.json --out FOLDER   draws FOLDER/gla_operator.png from results

Each is timed called from Python and replayed from a CUDA graph; medians of many, with the spread between quartiles.
fla is left out where it is not installed, or refuses. Its kernels run in the fastest of their configurations: those
are compiled by several processes first (--processes), then tried one after the other, alone on the GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import microseconds
from torch import Tensor
from triton_tuning import tune

from zeco_compile import gated_linear_attention

# name: (batch, tokens, heads, K, V, gate per, what is added to ordinary log gates)
SHAPES: dict[str, tuple[int, int, int, int, int, str, float]] = {
    "channel, 16k": (1, 16384, 16, 128, 128, "channel", 0.0),
    "channel, 32k": (1, 32768, 16, 128, 128, "channel", 0.0),
    "channel, -5 a token": (1, 16384, 16, 128, 128, "channel", -5.0),
    "channel, -20 a token": (1, 16384, 16, 128, 128, "channel", -20.0),
    "head, 16k": (1, 16384, 16, 128, 128, "head", 0.0),
    "channel, K=256 V=512": (1, 16384, 4, 256, 512, "channel", 0.0),
}
LENGTHS = tuple(1 << n for n in range(11, 19))


def inputs(shape: tuple[int, int, int, int, int, str, float]) -> tuple[list[Tensor], Tensor]:
    batch, tokens, heads, key, value, per, strength = shape
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
        for width in (key, key, value, value)
    )
    gate = torch.randn(
        (batch, tokens, heads, key) if per == "channel" else (batch, tokens, heads), device="cuda"
    )
    g = F.logsigmoid(gate) / 16 + strength
    return [x.requires_grad_() for x in (q, F.normalize(k, dim=-1).detach(), v, g)], do


def operators(per: str) -> dict[str, Callable[..., Tensor]]:
    """name -> (q, k, v, g) -> o."""
    found: dict[str, Callable[..., Tensor]] = {"zeco": lambda q, k, v, g: gated_linear_attention(q, k, v, g)}
    try:
        if per == "channel":
            from fla.ops.gla import chunk_gla as reference
        else:
            from fla.ops.simple_gla import chunk_simple_gla as reference
    except ImportError as error:
        print(f"without fla: {error}", flush=True)
        return found
    found["fla"] = lambda q, k, v, g: reference(q, k, v, g)[0]
    return found


def compile_for_fla(part: int, parts: int, shapes: list[tuple[int, int, int, int, int, str, float]]) -> str:
    """In a process of its own: every ``parts``-th configuration of each of fla's kernels, into Triton's cache."""
    tune(
        configurations=lambda configs: configs[part::parts] or configs[:1],
        do_bench=lambda run, quantiles: (run(), [0.0] * len(quantiles))[1],
    )
    for shape in shapes:
        leaves, do = inputs(shape)
        try:
            torch.autograd.grad(operators(shape[5])["fla"](*leaves), leaves, do)
        except Exception as error:  # what fla refuses here is a row of the table later
            return f"{shape}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return ""


def prepare_fla(shapes: list[tuple[int, int, int, int, int, str, float]], processes: int) -> None:
    """Compiles fla's configurations side by side, and makes it try each for a hundredth of a second."""
    import triton.testing

    # one of each that makes other kernels; short, since nothing is timed
    kinds = {(*shape[2:6], 0.0): (1, 4096, *shape[2:6], 0.0) for shape in shapes}
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [
            pool.submit(compile_for_fla, part, processes, list(kinds.values())) for part in range(processes)
        ]
        problems = {done.result() for done in work} - {""}
    print(f"{time.perf_counter() - begin:5.0f} s  fla's configurations compiled {problems or ''}", flush=True)
    tune(do_bench=partial(triton.testing.do_bench, warmup=3, rep=10))


def in_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(shape: tuple[int, int, int, int, int, str, float], rounds: int) -> dict[str, dict[str, Any]]:
    leaves, do = inputs(shape)
    runs: dict[str, Callable[[], Any]] = {}
    problems: dict[str, str] = {}
    memory: dict[str, float] = {}
    for name, operator in operators(shape[5]).items():

        def forward(operator: Callable[..., Tensor] = operator) -> Tensor:
            with torch.no_grad():
                return operator(*leaves)

        def both(operator: Callable[..., Tensor] = operator) -> Any:
            return torch.autograd.grad(operator(*leaves), leaves, do)

        for what, run in (("forward", forward), ("forward+backward", both)):
            try:
                run()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run()
                memory[f"{name} {what}"] = (torch.cuda.max_memory_allocated() - before) / 2**20
                runs[f"{name} {what}"] = run
                runs[f"{name} {what}, graph"] = in_graph(run)
            except Exception as error:  # a refusal of one operator is a row of the table
                problems[f"{name} {what}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(microseconds(run, 20))
    result: dict[str, dict[str, Any]] = {}
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4)
        result[name] = {"median_us": statistics.median(values), "spread_us": quartiles[2] - quartiles[0]}
    for name, mebibytes in memory.items():
        if name in result:
            result[name]["peak_mib"] = mebibytes
    return {**result, **{name: {"problem": problem} for name, problem in problems.items()}}


def floor_us(shape: tuple[int, int, int, int, int, str, float], bandwidth: float) -> dict[str, float]:
    """Each tensor read or written once."""
    batch, tokens, heads, key, value, per, _ = shape
    each = batch * tokens * heads
    gate = 4 * each * (key if per == "channel" else 1)
    forward = 2 * each * (2 * key + 2 * value) + gate
    backward = 2 * each * (4 * key + 3 * value) + 2 * gate
    return {"forward": forward / bandwidth * 1e6, "forward+backward": (forward + backward) / bandwidth * 1e6}


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    times = [microseconds(lambda: y.copy_(x), 5) for _ in range(7)]
    return 2 * x.nbytes / (statistics.median(times) * 1e-6)


def markdown(results: dict[str, Any]) -> str:
    lines = [
        f"{results['device']}, torch {results['torch']}, Triton {results['triton']}, fla {results['fla']}",
        "",
    ]
    lines += [
        "| shape | what | zeco µs | fla µs | ratio | floor µs | peak MiB (fla) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results["shapes"].items():
        for what in ("forward", "forward, graph", "forward+backward", "forward+backward, graph"):
            ours, theirs = row["times"].get(f"zeco {what}", {}), row["times"].get(f"fla {what}", {})
            ratio = (
                f"{ours['median_us'] / theirs['median_us']:.2f}"
                if "median_us" in ours and "median_us" in theirs
                else ""
            )
            cells = [
                f"{x['median_us']:.0f} ± {x['spread_us']:.0f}" if "median_us" in x else x.get("problem", "")
                for x in (ours, theirs)
            ]
            floor = row["floor_us"][what.split(",")[0]]
            peaks = " ".join(
                text.format(x["peak_mib"])
                for text, x in (("{:.0f}", ours), ("({:.0f})", theirs))
                if "peak_mib" in x
            )
            lines.append(f"| {name} | {what} | {cells[0]} | {cells[1]} | {ratio} | {floor:.0f} | {peaks} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    rows = [(row["tokens"], row) for name, row in results["shapes"].items() if name.startswith("T=")]
    for axis, what in zip(axes, ("forward", "forward+backward"), strict=True):
        for name, style in (("zeco", "o-"), ("fla", "s-")):
            points = [(t, row["times"].get(f"{name} {what}, graph", {}).get("median_us")) for t, row in rows]
            points = [(t, us) for t, us in points if us is not None]
            if points:
                axis.loglog(*zip(*points, strict=True), style, label=name)
        axis.loglog([t for t, _ in rows], [row["floor_us"][what] for _, row in rows], "k--", label="bytes")
        axis.set_title(f"{what}, CUDA graph")
        axis.set_xlabel("tokens")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("µs")
    axes[0].legend(loc="lower right")
    figure.suptitle(f"Gated linear attention, B=1 H=16 K=V=128 bf16, gate per channel: {results['device']}")
    figure.tight_layout()
    path = folder / "gla_operator.png"
    figure.savefig(path, dpi=120)
    return path


def version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/gla_operator"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=12, help="that compile fla's configurations")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot is not None:
        print(plot(json.loads(args.plot.read_text()), args.out))
        return
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "fla": version("fla-core"),
        "python": platform.python_version(),
        "copy_gb_s": bandwidth / 1e9,
        "shapes": {},
    }
    shapes = {name: SHAPES[name] for name in args.shapes}
    shapes |= {f"T={tokens}": (1, tokens, 16, 128, 128, "channel", 0.0) for tokens in args.lengths}
    if results["fla"] != "none":
        prepare_fla(list(shapes.values()), args.processes)
    begin = time.perf_counter()
    for name, shape in shapes.items():
        row = {
            "tokens": shape[1],
            "floor_us": floor_us(shape, bandwidth),
            "times": measure(shape, args.rounds),
        }
        results["shapes"][name] = row
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        (args.out / "results.md").write_text(markdown(results))
        shown = {key: round(value.get("median_us", -1)) for key, value in row["times"].items()}
        print(f"{time.perf_counter() - begin:5.0f} s  {name}: {shown}", flush=True)
    print(markdown(results))


if __name__ == "__main__":
    main()
