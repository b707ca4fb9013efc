"""flash-linear-attention's layers and a model of its own, sharded over real ranks, against the same run by fla alone.

    torchrun --nproc-per-node 2 tests/cuda/check_fla.py
    torchrun --nproc-per-node 2 tests/cuda/check_fla.py RWKV6Attention GLAForCausalLM

Each rank runs fla's own kernels on the whole sequence, and the layer compiled with backend="zeco" on its slice; bf16.
Outputs and every gradient, as root mean squares; fla's own distance from float32 weights is of the same size. Needs
GPUs, and fla-core and flash-linear-attention. Each of fla's kernels runs in the first of its configurations: to find
the fastest takes minutes, and changes no numbers. Prints a PASS or FAIL line for each, and leaves with 1 if one failed.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from triton_tuning import tune

WIDTH, HEADS, LOCAL = 256, 4, 192
ALLOWED = 2e-2


def layers() -> dict[str, Callable[[], nn.Module]]:
    from fla import layers as fla
    from fla.models import GLAConfig, GLAForCausalLM

    common = {"hidden_size": WIDTH, "num_heads": HEADS, "layer_idx": 0}
    small = GLAConfig(hidden_size=WIDTH, num_heads=HEADS, num_hidden_layers=2, vocab_size=512)
    return {
        "GatedLinearAttention": lambda: fla.GatedLinearAttention(**common),
        "GatedLinearAttention with short convolutions": lambda: fla.GatedLinearAttention(**common, use_short_conv=True),
        "MultiScaleRetention": lambda: fla.MultiScaleRetention(**common),
        "HGRN2Attention": lambda: fla.HGRN2Attention(**common),
        "RWKV6Attention": lambda: fla.RWKV6Attention(**common),
        "GLAForCausalLM": lambda: GLAForCausalLM(small),
    }  # fmt: skip


def main() -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tune(configurations=lambda configs: configs[:1])
    failed = 0
    for name, make in layers().items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        begin = time.perf_counter()
        try:
            errors = compare(make, device)
            worst = max(errors, key=lambda each: errors[each])
            good, text = errors[worst] < ALLOWED, f"{errors[worst]:.1e} at {worst}"
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-3:]
            good, text = False, f"{type(error).__name__}: {str(error)[:3000]} {where}"
        failed += not good
        if dist.get_rank() == 0 or not good:
            seconds = time.perf_counter() - begin
            print(f"{'PASS' if good else 'FAIL'} {name}: {text} ({seconds:.0f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return min(failed, 1)


def compare(make: Callable[[], nn.Module], device: torch.device) -> dict[str, float]:
    """Relative errors of the output and of each gradient, as root mean squares over all ranks' rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(device, torch.bfloat16).train()
    causal = hasattr(model, "lm_head")
    if causal:
        whole = torch.randint(512, (2, size * LOCAL), device=device)
    else:
        whole = torch.randn(2, size * LOCAL, WIDTH, device=device, dtype=torch.bfloat16)
    draw = torch.Generator(device).manual_seed(1)
    weights = torch.randn(2, size * LOCAL, 512 if causal else WIDTH, generator=draw, device=device)

    def run(
        model: nn.Module, function: Callable[..., Any], x: Tensor, weigh: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        given = x if causal else x.clone().requires_grad_()
        out = function(given)
        out = out.logits if causal else out[0]
        (out.float() * weigh).sum().backward()
        gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        if not causal:
            assert given.grad is not None
            gradients["input"] = given.grad.float()
        return out.detach().float(), gradients

    sharded = copy.deepcopy(model)  # before fla's rotary embedding keeps tables of the whole length
    wanted, wanted_gradients = run(model, model, whole, weights)
    mine, weigh = (t.chunk(size, 1)[rank].contiguous() for t in (whole, weights))
    got, gradients = run(sharded, torch.compile(sharded, backend="zeco", fullgraph=True), mine, weigh)
    errors = {"output": _relative(got, wanted.chunk(size, 1)[rank])}
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        if name == "input":
            errors[name] = _relative(gradient, wanted_gradients[name].chunk(size, 1)[rank])
        else:
            dist.all_reduce(gradient)
            errors[name] = _relative(gradient, wanted_gradients[name])
    return errors


def _relative(got: Tensor, wanted: Tensor) -> float:
    # not a number is as wrong as can be
    error = ((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=1e-20)).item()
    return error if error == error else float("inf")


if __name__ == "__main__":
    sys.exit(main())
