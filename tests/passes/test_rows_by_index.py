"""Rows of the sequence by their numbers, and the places of extremes: those of the whole sequence, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused, run_on_ranks

WORLD_SIZE, LENGTH = 3, 12


class Rows(nn.Module):
    """Of every op that reads rows: each rank has some of them, and of one sequence none but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, each = self.inner(x), torch.arange(2)
        last, twice = torch.tensor([11, 4]), torch.tensor([[0, 7, 7], [-1, -12, 3]])
        return (
            y[each, last],
            y[each[:, None], twice],
            y[:, twice],  # [B, 2, 3, D]
            y[each, last, torch.tensor([1, 3])],
            y.mT[:, each, last],
            y[each, :, torch.tensor([1, 2])].sum(1),  # features by an index, no rows
            y.gather(1, torch.tensor([[[0, 5, 5, 11]], [[8, 8, 8, 8]]])),
            y.index_select(1, torch.tensor([10, 0, 10], dtype=torch.int32)),
            (y * 100).long()[:, last, 0] + (y[..., 0] * 100).int().index_select(1, last),
            y.relu()[:, torch.tensor([3, 4])].pow(2).mean(),
        )


class Extremes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.inner(x)
        position = torch.arange(x.shape[1])[:, None]
        tied = torch.where((position == 2) | (position == 9), y.detach().abs().amax() + 1, y)
        not_a_number = torch.where((position == 5) | (position == 8), torch.nan, y.detach())
        return (
            *y.max(1),
            *y.min(1, keepdim=True),
            *tied.max(1),
            y.argmax(1),
            y.argmin(-2, keepdim=True),
            torch.zeros_like(y).argmax(1),
            not_a_number.argmax(1),
            not_a_number.min(1).indices,
            *(y * 3).int().max(1),
            *y.bfloat16().max(1),
            y.half().argmin(1),
            y[torch.arange(2), y[..., 0].argmax(1)],
        )


def _inputs() -> Tensor:
    return torch.randn(2, LENGTH, 4, dtype=torch.float64)


@pytest.mark.parametrize("model", [Rows, Extremes])
def test_equal(model: type[nn.Module]) -> None:
    assert_equivalent(model, _inputs, world_size=WORLD_SIZE)


def _raised_out_of_range() -> list[bool]:
    """On one rank, for numbers of no row and then for the outermost that there are: whether the call raised."""

    def indexed(x: Tensor, number: Tensor) -> Tensor:
        return x[:, number]

    def gathered(x: Tensor, number: Tensor) -> Tensor:
        return x.gather(1, number[None].expand(2, -1))

    def selected(x: Tensor, number: Tensor) -> Tensor:
        return x.index_select(1, number)

    import zeco_compile

    def raises(function, number: int) -> bool:  # type: ignore[no-untyped-def]
        places = torch.tensor([0, number])
        zeco_compile.mark_sequence(places, None)
        try:
            function(torch.zeros(2, 4), places)
        except (IndexError, RuntimeError):
            return True
        return False

    found = []
    for function, numbers in (
        (indexed, (12, -13, 100, 11, -12)),
        (gathered, (12, -1, 100, 11)),
        (selected, (12, -1, 100, 11)),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(
            function, backend="zeco", fullgraph=True, dynamic=False, options={"codegen": "aot_eager"}
        )
        found += [raises(compiled, number) for number in numbers]
    return found


def test_a_number_of_no_row_raises_on_every_rank() -> None:
    expected = [True] * 3 + [False] * 2 + ([True] * 3 + [False]) * 2
    assert run_on_ranks(_raised_out_of_range, world_size=WORLD_SIZE) == [expected] * WORLD_SIZE


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[torch.arange(2)[:, None], x[..., 0].argsort(1)],  # an index of rows of its own
        lambda x: x[:, 1:].argmax(1),
        lambda x: x.argmax(),
        lambda x: x[:, 1:][:, torch.tensor([2, 3])],
        lambda x: x.flatten(0, 1)[torch.tensor([2, 20])],
    ],
)
def test_refused(call) -> None:  # type: ignore[no-untyped-def]
    assert_refused(lambda: call, _inputs, world_size=2, error=UnsupportedOp, match="sequence")
