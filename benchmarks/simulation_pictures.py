"""Pictures of what was simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paper_model import PAPER_ALONE, PAPER_AT_256, PAPER_SCAN_MS

MIB = 1 << 20
LABELS = {"none": "no exchange (data parallel)"}
COLOURS = {
    "none": "0.55",
    "all_scan": "tab:blue",
    "all_scan_tree": "tab:green",
    "two_level": "tab:red",
    "lasp1": "tab:cyan",
    "lasp2": "tab:orange",
    "all-gather of k and v": "tab:purple",
    "all-to-all": "tab:brown",
}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Four pictures: throughput, what the exchange costs, scan times, sweeps. ``results`` may come from the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 100})
    written = []

    def save(figure: Any, name: str) -> None:
        path = folder / f"simulation_{name}.png"
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)

    def powers(axis: Any, values: Sequence[float], size: float = 1.0) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value / size:g}" for value in values])
        axis.xaxis.set_minor_locator(ticker.NullLocator())

    def line(axis: Any, method: str, points: dict, value: Callable[[int], float], **style: Any) -> None:
        # on a logarithmic axis nothing has no place, nor has what rounding leaves of it
        ranks = [int(at) for at in points if value(int(at)) > 1e-3]
        style.setdefault("ls", "--" if method in ("none", "lasp1", "all_scan_tree") else "-")
        style.setdefault("label", LABELS.get(method, method))
        axis.plot(ranks, [value(at) for at in ranks], color=COLOURS[method], marker=".", **style)

    lost = "tokens/s lost to the exchange, %"
    for picture, what in (("throughput", "tokens/s/rank"), ("lost", lost)):
        figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), sharex=True, sharey="row")
        for axis, (name, values) in zip(axes.T.flat, results["tokens/s/rank"].items(), strict=True):
            alone = {int(ranks): rate for ranks, rate in values["none"].items()}

            def shown(rate: float, without: float, what: str = what) -> float:
                return rate if what != lost else 100 * (1 - rate / without)

            for method, points in values.items():
                rates = {int(ranks): rate for ranks, rate in points.items()}
                if what != lost or method != "none":
                    line(axis, method, rates, lambda at, r=rates, a=alone, f=shown: f(r[at], a[at]))
            if name.endswith("paper"):
                theirs = PAPER_AT_256[int(name.split()[0])]
                for (who, rate), mark in zip(theirs.items(), ("*", "X"), strict=True):
                    value = shown(rate, PAPER_ALONE[16384])
                    axis.plot(256, value, mark, color="black", ms=10, ls="none", label=f"paper, {who}")
            powers(axis, list(alone))
            axis.set_title(name, fontsize=10)
            axis.set_ylim(**({"bottom": 0} if what != lost else {"bottom": 0.01, "top": 100}))
            axis.set_yscale("linear" if what != lost else "log")
        for axis in axes[:, 0]:
            axis.set_ylabel(what)
        for axis in axes[-1]:
            axis.set_xlabel("ranks")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=5, bbox_to_anchor=(0.5, -0.04))
        figure.suptitle(f"simulated: 1B GLA, {results['ranks per host']} ranks a host", y=0.95)
        save(figure, picture)

    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    for schedule, points in results["scan seconds"].items():
        times = {int(ranks): seconds for ranks, seconds in points.items()}
        line(axis, schedule, times, lambda at, t=times: 1e6 * t[at], ls="-")
    measured = {
        row["ranks"]: row["measured_us"]
        for row in results["checks"]
        if row["bytes"] == results["state bytes"]
    }
    marks = (
        ({ranks: 1e3 * value for ranks, value in PAPER_SCAN_MS.items()}, "*", 11, "paper's All-Scan"),
        (measured, "x", 6, "measured chain (two H200s)"),
    )
    for points, mark, size, label in marks:
        axis.plot(
            list(points),
            list(points.values()),
            mark,
            color="black",
            ms=size,
            ls="none",
            label=label,
            zorder=5,
        )
    powers(axis, list(times))
    axis.set(yscale="log", xlabel="ranks", ylabel="µs until the last rank has its state")
    size = f"{results['state bytes'] / MIB:g} MiB, {results['ranks per host']} ranks a host"
    axis.set_title(f"simulated: one scan of {size}")
    axis.legend()
    save(figure, "scan")

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5))
    for axis, (name, values) in zip(axes.flat, results["sweeps at 64 ranks"].items(), strict=True):
        relative = name == "tokens per rank"
        for label, points in values.items():
            data = {int(at): value for at, value in points.items()}
            style = "--" if label.endswith("latency") or "tree" in label else "-"
            line(
                axis,
                label.partition(",")[0],
                data,
                lambda at, d=data, r=relative: 100 * (d[at] - 1) if r else 1e6 * d[at],
                ls=style,
                label=label,
            )
        powers(axis, list(data), MIB if name == "state bytes" else 1)
        axis.set_yscale("log")
        axis.set_xlabel("state, MiB" if name == "state bytes" else name)
        axis.set_ylabel("step time over one rank's alone, + %" if relative else "µs of one scan")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if name == "blocks" else (1,)))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.legend(fontsize=8)
    figure.suptitle("simulated: sweeps at 64 ranks, 8 a host", y=0.93)
    save(figure, "sweeps")
    return written
