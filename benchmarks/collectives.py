"""All-Scan and the other ways to carry a state over the ranks: microseconds a scan, by algorithm, transport and size.

    torchrun --nproc-per-node 2 benchmarks/collectives.py --out out/collectives
    python benchmarks/collectives.py --out out/collectives            chains of virtual ranks on the GPUs of one process
    python benchmarks/collectives.py --plot FILE.json --out FOLDER    draws FOLDER/collectives.png from results

A scan forward and one back take turns, each waiting for the one before it, so a figure is a latency and not a rate;
medians of many, with the spread between quartiles, of the slowest rank. Called from Python, and replayed from a CUDA
graph. Virtual ranks sit on the GPUs in turn, so that with several each hop crosses the wire; a chain of more ranks than
there are GPUs shares what each has.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import microseconds, slowest

from zeco_compile.lowering import all_scan, communicator, symmetric

SIZES = tuple(1 << n for n in range(16, 25))
SCANS = 10
VIRTUAL = (2, 3, 5, 9, 17)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/collectives"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", type=Path, help="results to draw; nothing is measured")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.plot is not None:
        plot(json.loads(arguments.plot.read_text()), arguments.out / "collectives.png")
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl", device_id=device)
        rows = across_ranks(device, arguments.rounds)
    else:
        rows = virtual(arguments.rounds)
    if int(os.environ.get("RANK", 0)) == 0:
        write(rows, arguments.out)
    if dist.is_initialized():
        communicator.close_all()
        dist.destroy_process_group()


def state_of(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A state of that many bytes, 128 by 128 a head, and its decay."""
    heads = max(1, size // (128 * 128 * 4))
    value = min(128, size // (heads * 128 * 4))
    state = torch.randn(1, heads, 128, value, device=device)
    return state, -torch.rand(1, heads, 128, device=device)


def across_ranks(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name
    wire = communicator.communicator_for(group, device)
    shared = symmetric.scan_for(group, device)
    rows = []
    for size in SIZES:
        state, decay = state_of(size, device)
        ways = ways_of(wire, shared, state, decay)
        for name, way in ways.items():
            for how, times in timed(way, rounds).items():
                rows.append(
                    {
                        "ranks": wire.world_size,
                        "way": name,
                        "how": how,
                        "bytes": size,
                        **spread(slowest(times)),
                    }
                )
                if dist.get_rank() == 0:
                    print(rows[-1], flush=True)
    return rows


def ways_of(
    wire: communicator.Communicator,
    shared: symmetric.SymmetricScan | None,
    state: torch.Tensor,
    decay: torch.Tensor,
) -> dict[str, Callable[[bool], Any]]:
    """name -> function of the direction, which enqueues a scan."""

    def over_nccl(name: str, reverse: bool) -> Any:
        run = all_scan.algorithm(name)
        blocks = wire.plan(state, decay, name, 0).blocks
        reads = [state, decay]
        return wire.submit(
            "scan", lambda link: run(link, state, decay, None, blocks), reverse=reverse, reads=reads
        ).wait()

    ways: dict[str, Callable[[bool], Any]] = {}
    if shared is not None:
        ways["all_scan, symmetric memory"] = lambda reverse: shared.submit(
            "scan", state, decay, None, reverse=reverse
        ).wait()
    for name in ("all_scan", "all_scan_tree", "lasp2"):
        ways[f"{name}, NCCL"] = functools.partial(over_nccl, name)
    return ways


def timed(way: Callable[[bool], Any], rounds: int) -> dict[str, list[float]]:
    def scans() -> None:
        for _ in range(SCANS):
            way(False)
            way(True)

    scans()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        scans()
    return {how: [microseconds(run) / (2 * SCANS) for _ in range(rounds)] for how, run in
            (("python", scans), ("graph", graph.replay))}  # fmt: skip


def virtual(rounds: int) -> list[dict[str, Any]]:
    """Chains of ranks of this process, each with a stream of its own, all on one GPU and then on all in turn."""
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            # the first copy makes the one's memory reachable for the other's kernels
            torch.ones(1, device=f"cuda:{one}").to(f"cuda:{other}")
    rows = []
    for size in SIZES:
        for gpus in sorted({1, count}):
            for ranks in VIRTUAL:
                devices = [torch.device("cuda", rank % gpus) for rank in range(ranks)]
                rows.append(
                    {"ranks": ranks, "gpus": gpus, "way": f"virtual chain on {gpus} GPU{'s' * (gpus > 1)}",
                     "how": "graph", "bytes": size, **spread(one_chain(devices, size, rounds))}
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def one_chain(devices: list[torch.device], size: int, rounds: int) -> list[float]:
    """Microseconds of a scan by virtual ranks, replayed from a graph; its numbers are checked first."""
    failure = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    inputs = [state_of(size, device) for device in devices]
    hops = list(symmetric.virtual_chain(devices, symmetric.shape_of(*inputs[0]), failure))
    streams = [torch.cuda.Stream(device) for device in devices]
    # one after the other first: a kernel that waits for another must find it loaded
    carried = torch.zeros_like(inputs[0][0])
    for hop, stream, (state, decay) in zip(hops, streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            came = hop.run(state, decay, None, 10.0)
        stream.synchronize()
        torch.testing.assert_close(came, carried.to(came.device), rtol=1e-4, atol=1e-4)
        carried = decay.exp().unsqueeze(-1) * carried.to(came.device) + state
    # and once as it will be captured, so that the allocator of each GPU has what a capture may not ask for
    chain(hops, streams, inputs)
    for device in set(devices):
        torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain(hops, streams, inputs)
    times = [microseconds(graph.replay) for _ in range(rounds)]
    assert int(failure[0]) == 0, "a virtual rank waited in vain"
    return times


def chain(
    hops: list[symmetric.Hop],
    streams: list[torch.cuda.Stream],
    inputs: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    here = torch.cuda.current_stream()
    for hop, stream, (state, decay) in zip(hops, streams, inputs, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            hop.run(state, decay, None, 10.0)
    for stream in streams:
        here.wait_stream(stream)


def spread(times: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {"us": round(middle, 2), "us_low": round(low, 2), "us_high": round(high, 2)}


def write(rows: list[dict[str, Any]], out: Path) -> None:
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "rows": rows,
    }
    (out / "results.json").write_text(json.dumps(found, indent=1))
    lines = ["| ranks | way | how | KiB | µs | quartiles |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['ranks']} | {r['way']} | {r['how']} | {r['bytes'] >> 10} | {r['us']} | {r['us_low']} to {r['us_high']} |"
        for r in rows
    ]
    (out / "results.md").write_text("\n".join(lines) + "\n")


def plot(found: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found["rows"] if row["how"] == "graph"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lines = list(dict.fromkeys((row["ranks"], row["way"]) for row in rows))
    ranks, ways = (list(dict.fromkeys(each)) for each in zip(*lines, strict=True))
    for key in lines:
        points = sorted((row["bytes"], row["us"]) for row in rows if (row["ranks"], row["way"]) == key)
        # what there is more of has the colours
        colour, dashes = (ranks, ways) if len(ranks) > len(ways) else (ways, ranks)
        axes.plot(
            *zip(*points, strict=True), marker="o", label=f"{key[1]}, {key[0]} ranks",
            color=f"C{colour.index(key[colour is ways])}",
            linestyle=("-", "--", ":", "-.")[dashes.index(key[dashes is ways]) % 4],
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="bytes of the state", ylabel="µs a scan, in a CUDA graph")
    axes.set_xticks(
        list(SIZES), [f"{size >> 10} K" if size < 1 << 20 else f"{size >> 20} M" for size in SIZES]
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"{found['device']}, torch {found['torch']}, NCCL {found['nccl']}", fontsize=9)
    figure.savefig(file, dpi=140)


if __name__ == "__main__":
    main()
