"""Checks the Triton kernels on a GPU over sizes, dtypes and gates, against the float64 recurrence.

    python tests/cuda/check_kernels.py [--workers 12] [--sizes 128x128 256x512 ...]

Every part of the forward and the backward, with the attention matrices kept for all chunks and for those that need
them. Each size is compiled anew, so the cases are spread over processes. Memory that a kernel should have written and
did not is NaN. Prints a PASS or FAIL line for each case, and leaves with 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from torch import Tensor

from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention

# Of the largest element of each result: float32 as promised, the others by what their products round to.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
KEYS_VALUES = [
    (1, 2), (3, 5), (16, 16), (17, 300), (48, 80), (64, 64), (80, 96), (96, 48), (128, 128), (128, 512),
    (130, 200), (200, 40), (256, 2), (256, 128), (256, 256), (256, 512), (1, 512), (32, 100),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and run")
    parser.add_argument(
        "--sizes", nargs="*", default=[f"{k}x{v}" for k, v in KEYS_VALUES], help="256x128 ..."
    )
    arguments = parser.parse_args()
    pairs = [tuple(map(int, size.split("x"))) for size in arguments.sizes]
    sizes = [(key, value, dtype) for key, value in pairs for dtype in LIMITS]
    # one process a size, whose kernels are compiled once; an illegal access of one does not reach the others
    jobs = [
        (size, kind)
        for size in sorted(sizes, key=lambda size: -size[0] * size[1])
        for kind in ("channel", "head")
    ]
    failed = done = 0
    with ProcessPoolExecutor(
        arguments.workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for ended in as_completed([pool.submit(check, *size, kind) for size, kind in jobs]):
            for line in ended.result():
                done += 1
                failed += not line.startswith("PASS")
                print(line, flush=True)
    print(f"ALL PASS ({done})" if not failed else f"{failed} of {done} FAILED", flush=True)
    return 1 if failed else 0


def check(key: int, value: int, dtype: torch.dtype, kind: str) -> list[str]:
    """Lines for the gates, none too, of one size; one gate also with the tokens of each channel side by side."""
    kinds = [(kind, gate, False) for gate in ("slow", "strong", "mixed", "rising")]
    kinds += [(kind, "slow", True), *([("none", "", False)] if kind == "head" else [])]
    lines = []
    for each, gate, transposed in kinds:
        for everywhere in (False, True):
            title = f"K={key} V={value} {str(dtype)[6:]} {each} {gate} {'all matrices' if everywhere else ''}"
            title += " transposed" if transposed else ""
            try:
                errors = one(key, value, dtype, each, gate, everywhere, transposed)
            except Exception:
                lines.append(f"FAIL  {title}: {traceback.format_exc(limit=-3)}")
                continue
            worst = max(errors.values())
            detail = (
                f"{worst:.1e}"
                if worst <= LIMITS[dtype]
                else " ".join(f"{n} {e:.1e}" for n, e in errors.items())
            )
            lines.append(f"{'PASS' if worst <= LIMITS[dtype] else 'FAIL'}  {title}: {detail}")
    return lines


def one(
    key: int, value: int, dtype: torch.dtype, kind: str, gate: str, everywhere: bool, transposed: bool = False
) -> dict[str, float]:
    """The largest difference of each result, of its largest element."""
    from zeco_compile.kernels import fused

    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    draw = torch.Generator("cuda").manual_seed(key + 1000 * value)
    batch, tokens, heads = 2, 149, 2  # two chunks and a part of a third

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.float32).to(dtype)

    # strided as a split of one projection leaves them
    q, k = normal(batch, tokens, heads, 2 * key).split(key, -1)
    v, do = normal(batch, tokens, heads, value), normal(batch, heads, tokens, value).transpose(1, 2)
    state, dstate = (normal(batch, heads, key, value, dtype=torch.float32) for _ in range(2))
    g = None
    if kind != "none":
        shape = (batch, tokens, heads, *((key,) if kind == "channel" else ()))
        noise = torch.rand(shape, generator=draw, device="cuda")
        slow = -0.05 * noise
        # each chunk of each head another size, from blocks of a chunk down to single tokens
        chunk = (torch.arange(tokens, device="cuda") // 64).view(1, tokens, 1)
        size = 2.0 ** (
            chunk
            + 2 * torch.arange(heads, device="cuda")
            + 3 * torch.arange(batch, device="cuda").view(-1, 1, 1)
        )
        rising = -(0.5 + noise) * (size if kind == "head" else size.unsqueeze(-1))
        mixed = torch.where(noise < 0.1, -40.0, slow)
        g = {"slow": slow, "strong": slow - 7, "mixed": mixed, "rising": rising}[gate]
    if transposed:  # as a convolution over the tokens leaves them
        q, k, v, do, *gates = (
            x.movedim(1, -1).contiguous().movedim(-1, 1) for x in (q, k, v, do, *([] if g is None else [g]))
        )
        g = gates[0] if gates else None
    scale = key**-0.5
    leaves = [None if x is None else x.double().requires_grad_() for x in (q, k, v, g, state)]
    truth = recurrent_gated_linear_attention(
        *leaves[:4], scale=scale, initial_state=leaves[4], output_final_state=True, dtype=torch.float64
    )
    used = [x for x in leaves if x is not None]
    wanted = torch.autograd.grad(truth, used, [do.double(), dstate.double()])

    made, log_decay, kept = fused.prepare(q, k, v, g, scale, True)
    pairs = fused.chunk_pairs(q, k, v, g, scale, kept, everywhere)
    o, saved = fused.read_out(pairs, kept, q, k, v, g, state, scale, everywhere, True)
    dmade, dkept = fused.prepare_backward(q, k, v, g, do, scale, kept, True)
    dpairs = fused.chunk_pairs_backward(q, k, v, g, do, everywhere)
    dq, dk, dv, dg = fused.read_out_backward(
        pairs, dpairs, kept, saved, dkept, q, k, v, g, do, scale, dstate, everywhere
    )
    decay = log_decay.exp().unsqueeze(-1)
    results = [o, decay * state + made, dq, dk, dv, *([] if dg is None else [dg]), decay * dstate + dmade]
    names = ["o", "final", "dq", "dk", "dv", *([] if dg is None else ["dg"]), "dinitial"]
    return {name: _error(x, y) for name, x, y in zip(names, results, [*truth, *wanted], strict=True)}


def _error(got: Tensor, truth: Tensor) -> float:
    relative = ((got.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)).item()
    return relative if relative == relative else float("inf")


if __name__ == "__main__":
    sys.exit(main())
