"""Random values that are of no position: the first rank's on all ranks, whose generators differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.testing import run_on_ranks

KINDS = (
    "dropout", "dropout in place", "path", "bernoulli in place", "noise", "channels", "weights", "permutation",
)  # fmt: skip


class Model(nn.Module):
    """A pooled output [B, 4] of x: [B, T, 4], in which `kind` says what is drawn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        match self.kind:
            case "dropout":
                return self.outer(F.dropout(y.mean(1), 0.5))
            case "dropout in place":
                return self.outer(F.dropout(y.mean(1) * 1, 0.5, inplace=True))
            case "path":
                y = y * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) > 0.5) + x
            case "bernoulli in place":
                y = y * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5) + x
            case "noise":
                y = y + torch.randn(4, dtype=x.dtype) * torch.rand_like(y.mean(1, keepdim=True))
            case "channels":
                y = F.dropout1d(y.mT, 0.5).mT
            case "weights":
                y = F.linear(y, F.dropout(self.outer.weight, 0.5))
            case "permutation":
                y = y[..., torch.randperm(4)]
        return self.outer(y).mean(1)


def _made(kind: str, length: int) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(kind).double()
    x = torch.randn(4, length, 4, dtype=torch.float64)
    return model, x, torch.randn(4, 4, dtype=torch.float64)


def _errors(kind: str) -> tuple[list[float], set[str]]:
    """The differences of the output, the input's and the parameters' gradients from those of the whole sequence with
    the first rank's seed; and what was decided."""
    from zeco_compile import last_report

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, x, cotangent = _made(kind, 4 * ranks)
    mine = x.chunk(ranks, 1)[rank].clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zeco", fullgraph=True, options={"codegen": "aot_eager"})
    torch.manual_seed(100 + rank)
    out = compiled(mine)
    (out * cotangent).sum().backward()
    got = [out.detach(), mine.grad / ranks, *(p.grad for p in model.parameters())]
    for gradient in got[2:]:
        dist.all_reduce(gradient)
        gradient /= ranks
    model, x, _ = _made(kind, 4 * ranks)
    torch.manual_seed(100)
    out = model(x.requires_grad_())
    (out * cotangent).sum().backward()
    want = [out.detach(), x.grad.chunk(ranks, 1)[rank], *(p.grad for p in model.parameters())]
    report: Any = last_report()
    decisions = {decision.decision for decision in report.decisions}
    return [float((a - b).abs().max()) for a, b in zip(got, want, strict=True)], decisions


@pytest.mark.parametrize(
    ("kind", "world_size"), [*((kind, 2) for kind in KINDS), ("dropout", 3), ("channels", 3)]
)
def test_they_are_the_first_ranks(kind: str, world_size: int) -> None:
    for errors, decisions in run_on_ranks(_errors, kind, world_size=world_size):
        assert max(errors) < 1e-9
        assert "same on all ranks" in decisions


def _draws_along_the_sequence() -> list[Any]:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x * torch.rand(x.shape[1], dtype=x.dtype)[:, None], backend="zeco", fullgraph=True,
        options={"codegen": "aot_eager"},
    )  # fmt: skip
    torch.manual_seed(100 + dist.get_rank())
    return compiled(torch.ones(1, 4, 1, dtype=torch.float64)).flatten().tolist()


def test_those_along_the_sequence_are_each_ranks_own() -> None:
    first, second = run_on_ranks(_draws_along_the_sequence, world_size=2)
    assert first != second
