"""Exchanges against the same thing computed on the whole sequence in one process: values, and every gradient.

The gradients are those of one objective, the sum over ranks of <result, a random tensor of that rank's own>,
by autograd through the whole-sequence computation.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeco_compile.lowering import agreement, exchange, exchange_parts, halo, volume
from zeco_compile.lowering.errors import CommunicatorUnavailable, NeighbourLost, UnequalShards
from zeco_compile.lowering.groups import members, resolve_group

# --- the same on the whole sequence: lists with one entry a rank
# ---------------------------------------------


def _whole_halo(xs: list[Tensor], dim: int, left: int, right: int, fill: float) -> list[Tensor]:
    length = xs[0].shape[dim]
    before, after = list(xs[0].shape), list(xs[0].shape)
    before[dim], after[dim] = left, right
    whole = torch.cat([xs[0].new_full(before, fill), *xs, xs[0].new_full(after, fill)], dim)
    return [whole.narrow(dim, rank * length, left + length + right) for rank in range(len(xs))]


def _whole_halo_backward(grads: list[Tensor], dim: int, left: int, right: int) -> list[Tensor]:
    shape = list(grads[0].shape)
    shape[dim] -= left + right
    xs = [torch.zeros(shape, dtype=grads[0].dtype, requires_grad=True) for _ in grads]
    return list(torch.autograd.grad(_whole_halo(xs, dim, left, right, 0.0), xs, grads, create_graph=True))


def _whole_all_sum(xs: list[Tensor]) -> list[Tensor]:
    return [sum(xs[1:], xs[0])] * len(xs)


def _whole_from_rank(xs: list[Tensor], owner: int) -> list[Tensor]:
    return [xs[owner]] * len(xs)


def _whole_sum_to_rank(xs: list[Tensor], owner: int) -> list[Tensor]:
    total = sum(xs[1:], xs[0])
    return [total if rank == owner else total * 0 for rank in range(len(xs))]


def _whole_gather(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(xs, dim)] * len(xs)


def _whole_scatter_sum(xs: list[Tensor], dim: int) -> list[Tensor]:
    return list(sum(xs[1:], xs[0]).chunk(len(xs), dim))


def _whole_slice(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [x.chunk(len(xs), dim)[rank] for rank, x in enumerate(xs)]


def _whole_unslice(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [
        torch.cat([x if other == rank else torch.zeros_like(x) for other in range(len(xs))], dim)
        for rank, x in enumerate(xs)
    ]


WHOLE: dict[str, Callable[..., list[Tensor]]] = {
    "halo": _whole_halo,
    "halo_backward": _whole_halo_backward,
    "all_sum": _whole_all_sum,
    "from_rank": _whole_from_rank,
    "sum_to_rank": _whole_sum_to_rank,
    "gather_sequence": _whole_gather,
    "scatter_sum": _whole_scatter_sum,
    "slice_sequence": _whole_slice,
    "unslice_sequence": _whole_unslice,
}


# --- running one op on every rank ---------------------------------------------------------------------------


def _strided(x: Tensor, layout: str) -> Tensor:
    """The same values, as a model's views have them."""
    if layout == "reversed":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if layout == "every other":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x.clone()


def _on_rank(rank: int, cases: list[tuple[str, list[Tensor], list[Tensor] | None, tuple, str]]) -> list[Any]:
    group = resolve_group()
    results = []
    for op, xs, weights, args, layout in cases:
        x = _strided(xs[rank], layout)
        if weights is not None:
            x.requires_grad_()
        y = getattr(torch.ops.zeco, op)(x, *args, group)
        assert y.is_contiguous()
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or y.numel() == 0
        gradient = None
        if weights is not None:
            (gradient,) = torch.autograd.grad(y, x, _strided(weights[rank], layout))
        results.append((y.detach(), gradient))
    return results


def _case(
    op: str,
    args: tuple,
    shape: tuple[int, ...],
    world_size: int,
    dtype: torch.dtype = torch.float64,
    layout: str = "plain",
) -> tuple:
    """The case for the ranks, and what they have to give back."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((op, args, shape, world_size)).encode()))

    def random(shape: torch.Size | tuple[int, ...]) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        high = 2 if dtype == torch.bool else 100
        return torch.randint(0, high, shape, generator=generator).to(dtype)

    xs = [random(shape) for _ in range(world_size)]
    if not dtype.is_floating_point:
        return (op, xs, None, args, layout), (WHOLE[op](xs, *args), [None] * world_size)
    leaves = [x.double().requires_grad_() for x in xs]
    ys = WHOLE[op](leaves, *args)
    weights = [random(y.shape) for y in ys]
    gradients = torch.autograd.grad(
        ys, leaves, [weight.double() for weight in weights], materialize_grads=True
    )
    return (op, xs, weights, args, layout), ([y.detach() for y in ys], list(gradients))


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def _check(pool: Any, cases: list[tuple]) -> None:
    results = pool.run(_on_rank, [asked for asked, _ in cases])
    for index, (asked, (ys, gradients)) in enumerate(cases):
        op, xs, _, args, layout = asked
        for rank in range(len(xs)):
            y, gradient = results[rank][index]
            where = f"{op}{args} of {tuple(xs[rank].shape)} {xs[rank].dtype} {layout}, rank {rank}"
            pairs = [(y, ys[rank])] + ([(gradient, gradients[rank])] if gradients[rank] is not None else [])
            for found, expected in pairs:
                assert found.dtype == xs[rank].dtype, where
                assert found.shape == expected.shape, where
                if xs[rank].dtype.is_floating_point:
                    tolerance = TOLERANCE[xs[rank].dtype]
                    assert torch.allclose(found.double(), expected.double(), tolerance, tolerance), where
                else:
                    assert torch.equal(found, expected), where


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_halo_of_every_width(ranks: Any, world_size: int) -> None:
    cases = []
    for length in (1, 2, 3):
        for left, right in [(0, 0), (1, 0), (3, 0), (4, 0), (0, 1), (0, 4), (2, 1), (5, 7), (13, 11)]:
            cases.append(_case("halo", (1, left, right, 0.0), (2, length, 3), world_size))
            cases.append(_case("halo_backward", (1, left, right), (2, left + length + right, 3), world_size))
    _check(ranks(world_size), cases)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_dtype_dimension_and_layout(ranks: Any, world_size: int, dtype: torch.dtype) -> None:
    cases = []
    shape = (2 * world_size, 4 * world_size, world_size)
    for layout in ("plain", "reversed", "every other"):
        for dim in (0, 1, 2, -1, -3):
            fill = 1.0 if dtype == torch.bool else -100.0
            asked: list[tuple[str, tuple]] = [
                ("halo", (dim, 3, 0, fill)),
                ("halo", (dim, 0, 1, fill)),
                ("gather_sequence", (dim,)),
                ("slice_sequence", (dim,)),
                ("unslice_sequence", (dim,)),
                ("from_rank", (world_size - 1,)),
            ]
            if dtype != torch.bool:
                asked += [
                    ("all_sum", ()),
                    ("from_rank", (0,)),
                    ("sum_to_rank", (world_size - 1,)),
                    ("scatter_sum", (dim,)),
                ]
            cases += [_case(op, args, shape, world_size, dtype, layout) for op, args in asked]
    _check(ranks(world_size), cases)


@pytest.mark.parametrize("shape", [(3,), (1, 1), (2, 0, 3), (0, 3)])
def test_odd_shapes(ranks: Any, shape: tuple[int, ...]) -> None:
    dim = len(shape) - 1
    _check(
        ranks(3),
        [
            _case("halo", (dim, 2, 1, 0.0), shape, 3),
            _case("gather_sequence", (dim,), shape, 3),
            _case("unslice_sequence", (dim,), shape, 3),
            _case("all_sum", (), shape, 3),
            _case("from_rank", (1,), shape, 3),
        ],
    )


def test_scalars(ranks: Any) -> None:
    _check(ranks(2), [_case("all_sum", (), (), 2), _case("from_rank", (1,), (), 2)])


def test_halves_are_summed_in_float32(ranks: Any) -> None:
    """256 + 1 + 1 + 1 in bfloat16 is 256 if every step is rounded."""
    xs = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 2.0)]
    cases = [("all_sum", xs, None, (), "plain"), ("sum_to_rank", xs, None, (0,), "plain")]
    results = ranks(4).run(_on_rank, cases)
    assert [result[0][0].item() for result in results] == [260.0] * 4
    assert results[0][1][0].item() == 260.0


def _maximum(rank: int, xs: list[Tensor]) -> tuple[Tensor, str]:
    group = resolve_group()
    x = xs[rank]
    try:
        loss = exchange.all_max(x.double().requires_grad_(), group).sum()
        loss.backward()
    except RuntimeError as error:
        return exchange.all_max(x, group), str(error)
    return exchange.all_max(x, group), ""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_maximum(ranks: Any, world_size: int) -> None:
    xs = [torch.randn(4, 3).t() for _ in range(world_size)]
    xs[-1][1, 2] = float("nan")
    xs[0][0, 0] = float("-inf")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mine = [x.to(dtype) for x in xs]
        for result, error in ranks(world_size).run(_maximum, mine):
            assert torch.equal(result.nan_to_num(7.0), torch.stack(mine).amax(0).nan_to_num(7.0))
            assert result[1, 2].isnan()
            assert "all_max" in error  # no gradient: refused, not wrong
    for dtype in (torch.int64, torch.bool):
        mine = [(x.nan_to_num(0.0, 0.0, 0.0) * 2).to(dtype) for x in xs]
        for result, _ in ranks(world_size).run(_maximum, mine):
            assert torch.equal(result, torch.stack(mine).amax(0))


# --- sub-groups ---------------------------------------------------------------------------------------------


def _in_subgroup(rank: int) -> list[Tensor]:
    first, second = dist.new_group([2, 0], sort_ranks=False), dist.new_group([1, 3])
    group = resolve_group(first if rank in (0, 2) else second)
    x = torch.arange(4.0).view(1, 4) + 100 * rank
    x.requires_grad_()
    y = halo.halo(x, 1, 5, 1, -1.0, group)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return [
        y.detach(),
        gradient,
        exchange.from_rank(x.detach(), 1, group),
        exchange.gather_sequence(x.detach(), 1, group),
        exchange.slice_sequence(torch.arange(4.0).view(1, 4), 1, group),
    ]


def test_groups_inside_the_world_in_their_own_order(ranks: Any) -> None:
    results = ranks(4).run(_in_subgroup)
    for first, second in ((2, 0), (1, 3)):
        mine = {rank: torch.arange(4.0).view(1, 4) + 100 * rank for rank in (first, second)}
        both = torch.cat([mine[first], mine[second]], 1)
        expected = _whole_halo([mine[first], mine[second]], 1, 5, 1, -1.0)
        ones = [torch.ones_like(each) for each in expected]
        gradients = _whole_halo_backward(ones, 1, 5, 1)
        for place, rank in enumerate((first, second)):
            halo, gradient, owner, gathered, mine_of_full = results[rank]
            assert torch.equal(halo, expected[place])
            assert torch.equal(gradient, gradients[place])
            assert torch.equal(owner, mine[second])
            assert torch.equal(gathered, both)
            assert torch.equal(mine_of_full, torch.arange(4.0).view(1, 4)[:, 2 * place : 2 * place + 2])


def _counted(rank: int) -> dict[str, int]:
    group = resolve_group()
    x = torch.randn(2, 8, 3, requires_grad=True)
    volume.reset()
    halo.halo(x, 1, 3, 0, 0.0, group).sum().backward()
    return volume.sent()


def test_a_halo_sends_its_rows_and_no_more(ranks: Any) -> None:
    sent = ranks(3).run(_counted)
    rows = 2 * 3 * 3 * 4
    assert [counts.get("halo", 0) for counts in sent] == [rows, rows, 0]
    assert [counts.get("halo reverse", 0) for counts in sent] == [0, rows, rows]


def _followed(rank: int, length: int, count: int) -> list[bool]:
    return exchange.rows_followed(torch.ones(2, length), 1, count, resolve_group()).tolist()


def test_rows_with_others_behind_them(ranks: Any) -> None:
    """Of six rows on three ranks the last `count` have not `count` rows behind them."""
    for count in range(7):
        found = [flag for rank in ranks(3).run(_followed, 2, count) for flag in rank]
        assert found == [True] * (6 - count) + [False] * count
    assert exchange.rows_followed(torch.ones(4), -1, 1, "").tolist() == [True, True, True, False]


def _before(rank: int, backwards: bool) -> list[bool]:
    return exchange.ranks_before(torch.ones(2), backwards, resolve_group(), 3).tolist()


def test_ranks_before_this_one(ranks: Any) -> None:
    t, f = True, False
    assert ranks(3).run(_before, False) == [[f, f, f], [t, f, f], [t, t, f]]
    assert ranks(3).run(_before, True) == [[f, t, t], [f, f, t], [f, f, f]]
    assert exchange.ranks_before(torch.ones(4), False, "").tolist() == [False]


# --- what torch asks of an op, and compiled -----------------------------------------------------------------


def _opcheck(rank: int) -> None:
    group = resolve_group()
    world_size = members(group).world_size
    torch.manual_seed(0)
    x = torch.randn(2, 2 * world_size, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    labels = torch.arange(2 * world_size).view(1, -1)
    for op, arguments in [
        ("halo", (x, 1, 3, 1, 0.5, group)),
        ("halo", (labels, 1, 0, 1, -100.0, group)),
        ("halo", (labels > 1, 1, 2, 0, 0.0, group)),
        ("halo_backward", (x, -2, 1, 0, group)),
        ("all_sum", (x, group)),
        ("all_max", (x.detach(), group)),
        ("from_rank", (x, 0, group)),
        ("sum_to_rank", (x, 0, group)),
        ("gather_sequence", (x, 1, group, world_size, True)),
        ("gather_sequence", (labels, 1, group)),
        ("scatter_sum", (x, 1, group, world_size)),
        ("slice_sequence", (x, 1, group, world_size)),
        ("unslice_sequence", (x, 1, group, world_size)),
        ("at_rank", (x, 0, group)),
        ("rows_followed", (x, 1, 1, group)),
        ("ranks_before", (x, False, group, world_size)),
    ]:
        torch.library.opcheck(getattr(torch.ops.zeco, op).default, arguments)


@pytest.mark.parametrize("world_size", [1, 2])
def test_opcheck(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(_opcheck)


def _everything(x: Tensor, labels: Tensor, group: str, world_size: int) -> tuple[Tensor, ...]:
    padded = halo.halo(x, 1, 4, 1, 0.0, group)
    mixed = (padded[:, 4:-1] * padded[:, :-5].sin()) + padded[:, 5:]
    shift = exchange.all_max(mixed.detach().amax(1), group)
    weight = exchange.all_sum((mixed - shift[:, None]).exp().sum(1), group)
    last = exchange.from_rank(mixed[:, -1], world_size - 1, group)
    whole = exchange.gather_sequence(mixed, 1, group, world_size, True)
    back = exchange.slice_sequence(whole.cumsum(1), 1, group, world_size)
    targets = halo.halo(labels, 1, 0, 1, -100.0, group)[:, 1:]
    return back, weight.log(), last * weight, targets


def _compiled(rank: int, backend: str, lengths: list[int]) -> tuple[float, int]:
    import torch._dynamo.utils

    group = resolve_group()
    world_size = members(group).world_size
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(_everything, backend=backend, fullgraph=True)
    worst = 0.0
    for length in lengths:
        generator = torch.Generator().manual_seed(10 * length + rank)
        x = torch.randn(3, length, 2, generator=generator, dtype=torch.float64).transpose(0, 2)
        labels = torch.randint(0, 9, (2, length), generator=generator)
        results = []
        for run in (_everything, compiled):
            leaf = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, 1)
            torch._dynamo.mark_dynamic(labels, 1)
            *outputs, targets = run(leaf, labels, group, world_size)
            seeded = torch.Generator().manual_seed(rank)
            weights = [torch.randn(y.shape, generator=seeded, dtype=y.dtype) for y in outputs]
            gradient = torch.autograd.grad(outputs, leaf, weights)
            results.append([*outputs, targets, *gradient])
        for expected, found in zip(*results, strict=True):
            assert expected.shape == found.shape
            worst = max(worst, (expected - found).abs().max().item())
    return worst, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_a_symbolic_length(ranks: Any, world_size: int, backend: str) -> None:
    if backend == "inductor" and world_size == 3:
        pytest.skip("two ranks show it, and a compilation takes a while")
    for worst, graphs in ranks(world_size).run(_compiled, backend, [6, 3, 11, 4]):
        assert worst < 1e-12
        assert graphs == 1


def _gather_compiled(rank: int) -> tuple[Tensor, int]:
    import torch._dynamo.utils

    group = resolve_group()
    world_size = members(group).world_size

    def gathered(x: Tensor) -> Tensor:
        return exchange.gather_sequence(
            x, 1, group, world_size, True
        )  # nothing that a C++ compiler is needed for

    torch._dynamo.utils.counters.clear()
    result = torch.compile(gathered, backend="inductor", fullgraph=True)(torch.ones(2, 6) * rank)
    return result, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def test_a_cached_graph_is_not_taken_for_another_number_of_ranks(
    fresh_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups have the same name and the slices the same shape; and the same number of ranks does hit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for world_size, cached in ((2, False), (3, False), (2, True)):
        results = fresh_ranks(world_size).run(_gather_compiled)
        expected = torch.cat([torch.ones(2, 6) * rank for rank in range(world_size)], 1)
        for result, hits in results:
            assert torch.equal(result, expected)
            if cached:
                assert hits == 1


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("halo", (torch.ones(2, 3), 2, 1, 0, 0.0, ""), "dimension 2 of a tensor with 2 dimensions"),
        ("halo", (torch.ones(2, 3), 1, -1, 0, 0.0, ""), "widths -1 and 0"),
        ("halo", (torch.ones(2, 3).long(), 1, 1, 0, 0.5, ""), "cannot fill a tensor of torch.int64 with 0.5"),
        ("halo", (torch.ones(2, 3).bool(), 1, 1, 0, -100.0, ""), "cannot fill a tensor of torch.bool"),
        ("halo", (torch.ones(2, 3).int(), 1, 1, 0, float("inf"), ""), "cannot fill"),
        ("halo_backward", (torch.ones(2, 3), 1, 2, 2, ""), "fewer than the halo"),
        ("rows_followed", (torch.ones(2, 3), 2, 1, ""), "dimension 2 of a tensor with 2 dimensions"),
        ("all_sum", (torch.ones(2).bool(), ""), "torch.bool"),
        ("scatter_sum", (torch.ones(2).bool(), 0, ""), "torch.bool"),
        ("from_rank", (torch.ones(2), 1, ""), "owner 1 in a group of 1"),
        ("from_rank", (torch.ones(2), -1, ""), "owner -1"),
        ("slice_sequence", (torch.ones(2, 3), 1, "", 2), "compiled for 2 ranks"),
        ("gather_sequence", (torch.tensor(1.0), 0, ""), "0 dimensions"),
        ("ranks_before", (torch.ones(2), False, "", 2), "compiled for 2 ranks"),
    ],
)
def test_arguments_without_a_meaning(op: str, arguments: tuple, message: str) -> None:
    with pytest.raises(exchange_parts.InvalidExchange, match=message):
        getattr(torch.ops.zeco, op)(*arguments)


def _bad_on_rank(rank: int, case: str) -> None:
    group = resolve_group()
    if case == "indivisible":
        exchange.slice_sequence(torch.ones(2, 5), 1, group)
    elif case == "indivisible sum":
        exchange.scatter_sum(torch.ones(2, 5), 1, group)
    elif case == "owner":
        exchange.from_rank(torch.ones(2), members(group).world_size, group)
    elif case == "unequal":
        exchange.gather_sequence(torch.ones(2, 5 + rank), 1, group)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("indivisible", exchange_parts.IndivisibleSequence, "sequence of 5 .* into 2 slices"),
        ("indivisible sum", exchange_parts.IndivisibleSequence, "sequence of 5 .* into 2 slices"),
        ("owner", exchange_parts.InvalidExchange, "owner 2 in a group of 2"),
        ("unequal", UnequalShards, r"rank 0: \(2, 5\); rank 1: \(2, 6\)"),
    ],
)
def test_every_rank_raises(ranks: Any, case: str, error: type[Exception], message: str) -> None:
    for result in ranks(2).run(_bad_on_rank, case, errors=True):
        assert type(result) is error
        with pytest.raises(error, match=message):
            raise result


def _lonely(rank: int, op: str) -> tuple[Exception | None, float]:
    group = resolve_group()
    start = time.monotonic()
    x = torch.ones(2, 4)
    try:
        halo.halo(x, 1, 1, 1, 0.0, group) if op == "halo" else exchange.gather_sequence(x, 1, group)
    except (NeighbourLost, CommunicatorUnavailable, agreement.RankMissing) as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


@pytest.mark.parametrize("op", ["halo", "gather"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never-connected"])
def test_a_neighbour_that_never_comes(fresh_ranks: Any, op: str, connected: bool) -> None:
    pool = fresh_ranks(2, 3)
    if connected:
        assert [error for error, _ in pool.run(_lonely, op)] == [None, None]
    error, seconds = pool.run(_lonely, op, ranks=[0], seconds=60)[0]
    assert error is not None
    assert seconds < 3 + agreement._REPORT_SECONDS + 5
    if connected and op == "halo":
        assert isinstance(error, NeighbourLost)
        assert error.neighbour == 1
