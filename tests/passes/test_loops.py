"""Steps of a loop: what moves out of it, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeco_compile
from zeco_compile.kernels.errors import ZecoError
from zeco_compile.testing import NotEquivalent, assert_equivalent


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _inputs(length: int = 6) -> Tensor:
    return torch.randn(2, length, 6, dtype=torch.float64)


def _plain(m, x):
    h, outputs = x.new_zeros(2, 6), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.a(x[:, t])) * h + m.b(x[:, t])
        outputs.append(m.c(torch.relu(h)))
    return torch.stack(outputs, 1)


def test_what_moves_is_reported_and_done_once() -> None:
    report = zeco_compile.explain(Model(_plain).double(), _inputs(4))
    moved = [d for d in report.decisions if d.decision == "moved out of the loop"]
    # two projections, the gate; the output projection behind a relu
    assert [d.op for d in moved] == [
        "torch._C._nn.linear",
        "torch.sigmoid",
        "torch._C._nn.linear",
        "torch.relu",
    ]
    assert [d.detail for d in moved][-1] == "computed once for the outputs of all steps"
    assert [region.family for region in report.regions] == ["per head and token"]
    (record,) = [p for p in report.passes if p.name == "loops"]
    assert record.op_difference["torch.sigmoid"] == -4
    assert record.op_difference["aten.sigmoid.default"] == 1


def _last_token_in_every_step(m, x):
    h, outputs, last = x.new_zeros(2, 6), [], x[:, -1]
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.a(x[:, t])) * h + m.b(x[:, t])
        outputs.append(torch.tanh(h) * last)
    return torch.stack(outputs, 1)


def _first_output_in_every_step(m, x):
    h, outputs, first = x.new_zeros(2, 6), [], None
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.a(x[:, t])) * h + m.b(x[:, t])
        first = h if first is None else first
        outputs.append(torch.sin(h * first))
    return torch.stack(outputs, 1)


def _previous_value(m, x):
    before, outputs = None, []
    for t in range(x.shape[1]):
        z = torch.sigmoid(m.a(x[:, t]))
        before = z if before is None else before
        outputs.append(torch.tanh(z - 0.5 * before))
        before = z
    return torch.stack(outputs, 1)


def _state_in_place(m, x):
    a, h, outputs = torch.sigmoid(m.a(x)), x.new_zeros(2, 6), []
    for t in range(x.shape[1]):
        h *= 0.9
        h += a[:, t]
        outputs.append(torch.relu(h))
    return torch.stack(outputs, 1)


def _state_in_place_by_methods(m, x):
    a, h, outputs = torch.sigmoid(m.a(x)), x.new_zeros(2, 6), []
    for t in range(x.shape[1]):
        h.mul_(0.9).add_(a[:, t])
        outputs.append(torch.tanh(h))
    return torch.stack(outputs, 1)


def _output_changed_through_a_view(m, x):
    state, outputs = x.new_zeros(2, 2, 3, 3), []
    for t in range(x.shape[1]):
        q, k, v = (f(x[:, t]).view(2, 2, 3) for f in (m.a, m.b, m.c))
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        o = torch.einsum("bhk,bhkv->bhv", q, state)
        outputs.append(torch.tanh(o))
        o.view(2, -1).mul_(3)
    return torch.stack(outputs, 1)


def _heads_outside_tokens_inside(m, x):
    q, k, v = (f(x).view(2, -1, 2, 3) for f in (m.a, m.b, m.c))
    heads = []
    for head in range(2):
        state, outputs = x.new_zeros(2, 3, 3), []
        for t in range(x.shape[1]):
            state = 0.9 * state + k[:, t, head, :, None] * v[:, t, head, None, :]
            outputs.append((q[:, t, head].unsqueeze(1) @ state).squeeze(1))
        heads.append(torch.stack(outputs, 1))
    return m.a(torch.cat(heads, -1))


MODELS = (
    _last_token_in_every_step, _first_output_in_every_step, _previous_value, _state_in_place,
    _state_in_place_by_methods, _output_changed_through_a_view, _heads_outside_tokens_inside,
)  # fmt: skip


@pytest.mark.parametrize("function", MODELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_or_refused(function: Callable[..., Tensor], world_size: int) -> None:
    try:
        assert_equivalent(lambda: Model(function), _inputs, world_size=world_size)
    except NotEquivalent:
        raise
    except ZecoError as refused:
        if world_size == 1 or "test_loops.py" not in str(refused):
            raise


def test_a_draw_of_each_step_stays_one() -> None:
    def noisy(x: Tensor) -> Tensor:
        return torch.stack([torch.sin(x[:, t] + torch.randn(8, 6)) for t in range(x.shape[1])], 1)

    compiled = torch.compile(noisy, backend="zeco", fullgraph=True, options={"codegen": "aot_eager"})
    assert compiled(torch.ones(8, 5, 6)).std(1).mean() > 0.1


def test_a_decay_of_zero_is_an_error_with_its_line_on_one_rank_and_at_once_on_the_other() -> None:
    from zeco_compile.lowering.errors import DecayNotPositive, NeighbourLost
    from zeco_compile.testing import run_on_ranks

    outcomes = run_on_ranks(_zero_on_the_first_rank, world_size=2, group_timeout=31.0, check=False)
    first, second = (outcome.value for outcome in outcomes)
    assert type(first[0]) is DecayNotPositive
    assert "test_loops.py" in str(first[0])
    assert type(second[0]) is NeighbourLost
    assert second[1] < 20, "seconds, not the group's timeout"


def _zero_on_the_first_rank() -> tuple[BaseException | None, float]:
    import time

    import torch.distributed as dist

    def decays(a: Tensor, z: Tensor) -> Tensor:
        h, outputs = z.new_zeros(2, 3), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + z[:, t]
            outputs.append(h)
        return torch.stack(outputs, 1)

    compiled = torch.compile(decays, backend="zeco", fullgraph=True, options={"codegen": "aot_eager"})
    a = torch.rand(2, 4, 3) + 0.1
    compiled(a, torch.randn(2, 4, 3))
    if dist.get_rank() == 0:
        a[0, 0, 0] = 0
    start = time.monotonic()
    try:
        compiled(a, torch.randn(2, 4, 3))
    except RuntimeError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start
