"""Whole models over real ranks, on GPUs or on the CPU, through Inductor: equal to themselves, unsharded, in eager.

    torchrun --nproc-per-node 2 tests/cuda/check_models.py

What the tests do on the CPU, once for each kind of rewrite: a loop with projections in it, a decay as a number
between zero and one, softmax attention beside the linear kind, losses over a part of the sequence, complex states, a
running maximum. Outputs and every gradient in float64. NCCL where every rank has a GPU of its own, else gloo on the
CPU. Prints a PASS or FAIL line for each model, and leaves with 1 if one failed.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LOCAL = 6


class Cell(nn.Module):
    """Everything in the step; the decay is a sigmoid to the power 1/4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.g, self.out = (
            nn.LayerNorm(8),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(x.shape[0], 2, 4, 4), []
        for t in range(x.shape[1]):
            y = self.norm(x[:, t])
            q, k, v = self.qkv(y).unflatten(-1, (3, 2, 4)).unbind(1)
            decay = torch.sigmoid(self.g(y)).unflatten(-1, (2, 4)) ** 0.25
            state = decay[..., None] * state + k[..., None] * v[..., None, :]
            outputs.append(self.out(F.silu((q[..., None] * state).sum(-2).flatten(1))))
        return torch.stack(outputs, 1)


class Hybrid(nn.Module):
    """Causal softmax attention, then linear attention, and a next-row loss."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.one, self.two, self.written_out = nn.Linear(8, 24), nn.Linear(8, 24), written_out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.one(x).chunk(3, -1))
        if self.written_out:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            y = (q @ k.mT / 2).masked_fill(mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + y.transpose(1, 2).flatten(2)
        q, k, v = self.two(y).chunk(3, -1)
        y = y + torch.tril(q @ k.mT) @ v
        return y, F.smooth_l1_loss(y[:, :-1], x[:, 1:])


class ComplexPoles(nn.Module):
    """A linear recurrent unit: complex decays from parameters, the real part of what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.phase = nn.Parameter(torch.rand(6) - 2.5), nn.Parameter(torch.rand(6))
        self.write, self.read = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        poles = torch.exp(torch.complex(-self.size.exp(), self.phase.exp()))
        written = torch.view_as_complex(self.write(x).unflatten(-1, (6, 2)))
        state, rows = torch.zeros_like(written[:, 0]), []
        for t in range(x.shape[1]):
            state = poles * state + written[:, t]
            rows.append(state)
        return self.read(torch.view_as_real(torch.stack(rows, 1)).flatten(-2))


class Stabilised(nn.Module):
    """RWKV-4 with the largest exponent so far carried along."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.bonus = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        # what is added to all keys cancels: its gradient is zero, and rounding
        self.key, self.value = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        key, value, decay = 9 * self.key(x), self.value(x), -self.decay.exp()
        above, below = torch.zeros_like(key[:, 0]), torch.zeros_like(key[:, 0])
        largest, rows = torch.full_like(key[:, 0], -1e38), []
        for t in range(x.shape[1]):
            now = self.bonus + key[:, t]
            top = torch.maximum(largest, now)
            old, new = torch.exp(largest - top), torch.exp(now - top)
            rows.append((old * above + new * value[:, t]) / (old * below + new))
            top = torch.maximum(largest + decay, key[:, t])
            old, new = torch.exp(largest + decay - top), torch.exp(key[:, t] - top)
            above, below, largest = old * above + new * value[:, t], old * below + new, top
        return torch.stack(rows, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cell": Cell,
    "softmax attention, linear attention, loss": lambda: Hybrid(False),
    "softmax written out": lambda: Hybrid(True),
    "complex poles": ComplexPoles,
    "a running maximum": Stabilised,
}


def main() -> int:
    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=datetime.timedelta(seconds=120))
    failed = 0
    for name, make in MODELS.items():
        start = time.perf_counter()
        try:
            worst = _difference(make, device)
            good = worst < 1e-9
            text = f"largest relative difference {worst:.1e}"
        except Exception:
            good, text = False, traceback.format_exc()
        failed += not good
        if dist.get_rank() == 0 or not good:
            seconds = time.perf_counter() - start
            print(f"{'PASS' if good else 'FAIL'} {name}: {text} ({seconds:.0f} s, {device.type})", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return min(failed, 1)


def _difference(make: Callable[[], nn.Module], device: torch.device) -> float:
    """The largest relative difference of outputs and gradients from the unsharded model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(device, torch.float64)
    x = torch.randn(2, world_size * LOCAL, 8, dtype=torch.float64).to(device).requires_grad_()
    weights = torch.randn(2, world_size * LOCAL, 8, dtype=torch.float64).to(device)

    def leaves(outputs: Tensor | tuple[Tensor, Tensor], weigh: Tensor, share: float) -> Tensor:
        rows, *loss = outputs if isinstance(outputs, tuple) else (outputs,)
        return (rows * weigh).sum() + sum(loss) * share  # type: ignore[operator]

    expected = leaves(model(x), weights, 1.0)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()])
    mine = x.detach().chunk(world_size, 1)[rank].contiguous().requires_grad_()
    compiled = torch.compile(model, backend="zeco", fullgraph=True)
    # every rank calls backward() on its rows and its share of what is equal on all
    got = leaves(compiled(mine), weights.chunk(world_size, 1)[rank], 1.0 / world_size)
    gradients = list(torch.autograd.grad(got, [mine, *model.parameters()]))
    total = got.detach().clone()
    for each in (total, *gradients[1:]):
        dist.all_reduce(each)
    wanted_here = [wanted[0].chunk(world_size, 1)[rank], *wanted[1:]]
    pairs = [(total, expected.detach()), *zip(gradients, wanted_here, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
