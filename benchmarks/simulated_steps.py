"""Training steps of the whole model on many ranks: layer by layer, what is computed and what is waited for.

A rank takes part in a layer's exchange when it gets there itself, so delays travel from layer to layer as they would.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paper_model import LAYERS, PAPER_ALONE, PAPER_OPERATOR_MS, WIDTH
from simulated_scans import Machine, all_to_all, ring_gather, scan

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer on one rank, by direction: the operator's parts around the scan, and all the rest."""

    before: float
    beside: float
    after: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.before + self.beside + self.after + self.rest

    @classmethod
    def of(cls, operator: float, rest: float) -> Layer:
        return cls(0.3 * operator, 0.3 * operator, 0.4 * operator, rest)


def step(method: str, machine: Machine, forward: Layer, backward: Layer, tokens: int) -> float:
    """Seconds of a forward and a backward of the whole model, until the last rank is through.

    ``method`` a schedule, "none" (no exchange: what data parallelism reaches), "all-gather of k and v", or
    "all-to-all" (Ulysses: q, k, v, g in and o out, heads split over ranks).
    """
    times = [0.0] * machine.ranks
    for layer, where in ((forward, machine), (backward, machine.reversed())):
        for _ in range(LAYERS):
            times = _through_layer(method, where, layer, times, tokens)
        times = times[::-1]  # the backward's first rank is the forward's last; and back
    return max(times)


def _through_layer(
    method: str, machine: Machine, layer: Layer, times: Sequence[float], tokens: int
) -> list[float]:
    begun = [time + layer.rest + layer.before for time in times]
    row = tokens * WIDTH * 2  # bytes of one of q, k, v, o in bf16; g is float32
    if machine.ranks == 1 or method == "none":
        there = begun
    elif method == "all-gather of k and v":
        there = ring_gather(machine, [time + layer.rest for time in times], 2 * row)
        return [time + layer.before + layer.beside + layer.after for time in there]
    elif method == "all-to-all":
        inward = all_to_all(machine, [time + layer.rest for time in times], 5 * row)
        done = [time + layer.before + layer.beside + layer.after for time in inward]
        return all_to_all(machine, done, row)
    else:
        there = scan(method, machine, begun)
    return [
        max(mine + layer.beside, arrived) + layer.after for mine, arrived in zip(begun, there, strict=True)
    ]


def layers(tokens: int, operator: str) -> tuple[Layer, Layer]:
    """Forward and backward; ``operator`` "paper" (6.55 ms at 16k) or "h200" (measured, this package's)."""
    rest = tokens / PAPER_ALONE[16384] / LAYERS - PAPER_OPERATOR_MS * 1e-3 * tokens / 16384
    if operator == "paper":
        both = PAPER_OPERATOR_MS * 1e-3 * tokens / 16384
        forward = both / 3
    else:
        times = json.loads((RESULTS / "gla_operator_h200.json").read_text())["shapes"][f"T={tokens}"]["times"]
        forward = times["zeco forward, graph"]["median_us"] * 1e-6
        both = times["zeco forward+backward, graph"]["median_us"] * 1e-6
    # a backward of matrix products takes twice as long as its forward
    return Layer.of(forward, rest / 3), Layer.of(both - forward, rest * 2 / 3)
