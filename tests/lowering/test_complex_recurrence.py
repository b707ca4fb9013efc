"""The complex recurrence over the ranks of a group: against the steps on the whole sequence, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.lowering import in_flight
from zeco_compile.lowering.all_scan import ALGORITHMS
from zeco_compile.lowering.errors import InvalidSchedule, SecondDerivative


def zeco():
    """torch.ops.zeco. Functions that go to another process by value cannot say ``torch.ops`` themselves."""
    import torch as imported

    return imported.ops.zeco


def _inputs(length: int, same: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole sequence; decays as they are drawn, some zero and some beyond one."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.complex128).to(dtype)

    shape = (1, 1, 2, 3) if same else (2, length, 2, 3)
    a = torch.sgn(normal(*shape)) * (torch.rand(shape, generator=draw) * 0.2 + 0.83)
    a[..., 0, 0] = 0
    made = {"u": (2, length, 2, 3), "dh": (2, length, 2, 3), "initial": (2, 2, 3), "dfinal": (2, 2, 3)}
    return {"a": a, **{name: normal(*sizes) for name, sizes in made.items()}}


def _steps(a: torch.Tensor, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    a, rows = a.expand(u.shape), []
    for t in range(u.shape[1]):
        h = a[:, t] * h + u[:, t]
        rows.append(h)
    return torch.stack(rows, 1)


def _errors(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case, the largest error of this rank's outputs and gradients, relative to the largest entry."""
    out = []
    world_size, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    for case in cases:
        torch.compiler.reset()
        length, same = case.get("length", 5), case.get("same", False)
        dtype = case.get("dtype", torch.complex128)
        full = _inputs(length * world_size, same, dtype)
        wide = {n: x.to(torch.complex128) for n, x in full.items()}
        leaves = [wide[n].requires_grad_() for n in ("a", "u", "initial")]
        h = _steps(*leaves)
        # each rank differentiates its own copy of the final state, and those gradients add up
        ups = [wide["dh"], world_size * wide["dfinal"]]
        expected = [h, h[:, -1], *torch.autograd.grad([h, h[:, -1]], leaves, ups)]

        schedule, blocks = case.get("schedule", "auto"), case.get("blocks", 0)

        def layer(a, u, initial, schedule=schedule, blocks=blocks):
            return zeco().complex_recurrence(a, u, initial, True, schedule, blocks, group)

        if "how" in case:
            layer = torch.compile(layer, backend=case["how"], fullgraph=True, dynamic=True)
        rows = slice(rank * length, (rank + 1) * length)
        # what is conjugated lazily is sent as what it stands for
        along = {"u", "dh", "h", "du", *(() if same else ("a", "da"))}
        mine = {n: x[:, rows] if n in along else x for n, x in full.items()}
        mine = {n: x.conj().clone().conj() for n, x in mine.items()}
        own = [mine[n].detach().requires_grad_() for n in ("a", "u", "initial")]
        got_h, final = layer(*own)
        assert got_h.is_contiguous()
        assert got_h.dtype == final.dtype == dtype
        got = [got_h, final, *torch.autograd.grad([got_h, final], own, [mine["dh"], mine["dfinal"]])]
        if same:
            got[2] = got[2].resolve_conj().contiguous()
            dist.all_reduce(got[2])
        if rank > 0:
            expected[4] = torch.zeros_like(expected[4])
        errors = {"in flight": float(in_flight.pending())}
        for name, found, wanted in zip(("h", "final", "da", "du", "dinitial"), got, expected, strict=True):
            scale = max(1.0, float(wanted.abs().max()))
            wanted = wanted[:, rows] if name in along else wanted
            errors[name] = float((found - wanted).abs().max()) / scale
        out.append(errors)
    return out


def _check(pool: Any, cases: list[dict[str, Any]]) -> None:
    for rank, per_case in enumerate(pool.run(_errors, cases)):
        for case, errors in zip(cases, per_case, strict=True):
            limit = 1e-5 if case.get("dtype") == torch.complex64 else 1e-11
            assert all(error <= limit for error in errors.values()), f"rank {rank}, {case}: {errors}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_gradient_on_every_rank(ranks, world_size):
    cases: list[dict[str, Any]] = [{"schedule": each, "same": same} for each in ALGORITHMS for same in (0, 1)]
    cases += [{"length": length, "blocks": 2} for length in (1, 2, 70)]
    cases += [{"dtype": torch.complex64, "length": 40}]
    _check(ranks(world_size), cases)


@pytest.mark.parametrize("how", ["aot_eager", "inductor"])
def test_compiled(ranks, how):
    _check(ranks(2), [{"how": how}, {"how": how, "same": True, "dtype": torch.complex64}])


def _recurrence(a, u, initial=None, final=False, schedule="auto"):
    return zeco().complex_recurrence(a, u, initial, final, schedule, 0, "")


def test_one_rank_without_a_group():
    full = _inputs(9, False, torch.complex128)
    h, final = _recurrence(full["a"], full["u"])
    torch.testing.assert_close(h, _steps(full["a"], full["u"], torch.zeros_like(full["initial"])))
    assert final.numel() == 0


def test_a_zero_decay_has_its_gradient():
    a = torch.zeros(1, 3, 1, dtype=torch.complex128, requires_grad=True)
    u = torch.tensor([[[1 + 2j], [3.0], [1j]]], dtype=torch.complex128)
    h, _ = _recurrence(a, u)
    (da,) = torch.autograd.grad(h, a, torch.ones_like(h))
    torch.testing.assert_close(da.flatten(), torch.tensor([0, 1 - 2j, 3], dtype=torch.complex128))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        pytest.param({"u": torch.zeros(2, 4, 3)}, InvalidShapes, "one complex dtype", id="real"),
        pytest.param({"a": torch.zeros(2, 4, 2) + 0j}, InvalidShapes, "do not fit", id="features"),
        pytest.param({"a": torch.zeros(4, 3) + 0j}, InvalidShapes, "do not fit", id="dimensions"),
        pytest.param({"initial": torch.zeros(2, 4) + 0j}, InvalidShapes, "initial_state", id="state"),
        pytest.param({"schedule": "fastest"}, InvalidSchedule, "fastest", id="schedule"),
    ],
)
def test_what_does_not_fit(change, error, says):
    given = {"a": torch.zeros(2, 4, 3) + 0j, "u": torch.zeros(2, 4, 3) + 0j, **change}
    with pytest.raises(error, match=says):
        _recurrence(**given)


def test_second_derivatives_are_refused():
    a = torch.ones(1, 2, 1, dtype=torch.complex64, requires_grad=True)
    h, _ = _recurrence(a, torch.ones(1, 2, 1, dtype=torch.complex64))
    with pytest.raises(SecondDerivative, match="complex_recurrence"):
        torch.autograd.grad(h.abs().sum(), a, create_graph=True)
