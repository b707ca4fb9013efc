"""Scans: what is written out, what is left of it, and what stays as it was."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import zeco_compile
from zeco_compile.testing import assert_equivalent


class Gated(nn.Module):
    """A linear recurrence of matrices, with all that a step does for itself inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(token).chunk(3, -1)
            state = state * torch.sigmoid(self.gate(token))[:, :, None] + k[:, :, None] * v[:, None]
            return state.clone(), self.out(torch.relu((q[:, :, None] * state).sum(1)))

        return scan(step, x.new_zeros(x.shape[0], 8, 8), x, dim=1)[1]


class Squashed(nn.Module):
    """A recurrence that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h + token)
            return h, h.clone()

        return scan(step, x.new_zeros(x.shape[0], x.shape[2]), x, dim=1)[1]


def test_the_operator_takes_the_place_of_the_scan() -> None:
    report = zeco_compile.explain(Gated(), torch.randn(2, 6, 8))
    assert [region.family for region in report.regions] == ["per channel"]
    assert [d.decision for d in report.decisions] == ["written out for all steps at once"]
    before = {op: n for p in report.passes for op, n in p.op_difference.items() if "carry" in op}
    assert set(before) == {"zeco.carry_before.default", "zeco.carry_after.default"}
    change: dict[str, int] = {}
    for record in report.passes:
        for op, n in record.op_difference.items():
            change[op] = change.get(op, 0) + n
    assert change["scan"] == -1
    assert change["zeco.gated_linear_attention.default"] == 1
    assert change["zeco.carry_before.default"] == change["zeco.carry_after.default"] == 0


def test_what_is_no_linear_attention_stays_a_scan_on_one_rank() -> None:
    x = torch.randn(2, 6, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(Squashed(), backend="zeco", options={"codegen": "aot_eager"})(x)
    torch.testing.assert_close(found, Squashed()(x))
    report = zeco_compile.last_report()
    assert report is not None
    assert report.regions == []
    assert report.decisions == []


def test_with_code_from_inductor_in_single_precision() -> None:
    found = assert_equivalent(
        Gated, lambda: torch.randn(2, 8, 8), world_size=2, dtype=torch.float32, codegen="inductor"
    )
    assert [region["family"] for region in found.regions] == ["per channel"]
