"""Tables of one row per position that the code makes of the length and of parameters: whole on every rank, sliced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.testing import assert_equivalent, assert_refused

WIDTH = 4
Table = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A projection, plus what `table(model, x)` makes."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.rows, self.project, self.table = (
            nn.Parameter(torch.randn(32, WIDTH)),
            nn.Linear(WIDTH, WIDTH),
            table,
        )
        self.register_buffer("counted", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + self.table(self, x)


def _inputs() -> Tensor:
    return torch.randn(2, 8, WIDTH)  # as many tokens a rank as features


def _stretched(m: Model, x: Tensor, mode: str) -> Tensor:
    return F.interpolate(m.rows.t()[None], size=x.shape[1], mode=mode)[0].t()


TABLES: dict[str, Table] = {
    "padded behind": lambda m, x: F.pad(m.rows[:2], (0, 0, 0, x.shape[1] - 2)),
    "padded in front": lambda m, x: F.pad(m.rows[:2], (0, 0, x.shape[1] - 2, 0)),
    "cut": lambda m, x: F.pad(m.rows, (0, 0, 0, x.shape[1] - 32)),
    "stretched": lambda m, x: _stretched(m, x, "linear"),
    "repeated": lambda m, x: m.rows[:2].repeat_interleave(x.shape[1] // 2, 0),
    "split": lambda m, x: m.rows.split([x.shape[1], 32 - x.shape[1]])[0],
    "flipped": lambda m, x: m.rows[: x.shape[1]].flip(0),
    "the last rows": lambda m, x: m.rows[-x.shape[1] :],
    "detached": lambda m, x: F.pad(m.rows[:2].detach(), (0, 0, 0, x.shape[1] - 2)) * m.rows[0],
}


@pytest.mark.parametrize("name", TABLES)
def test_table(name: str) -> None:
    table = TABLES[name]
    found = assert_equivalent(lambda: Model(table), _inputs, world_size=2)
    assert "made for the whole sequence" in {d["decision"] for d in found.reports[0]["decisions"]}


@pytest.mark.parametrize("dynamic", [None, True])
def test_three_ranks(dynamic: bool | None) -> None:
    assert_equivalent(
        lambda: Model(TABLES["stretched"]), lambda: torch.randn(2, 15, WIDTH), world_size=3, dynamic=dynamic
    )


def _of_a_written_buffer(m: Model, x: Tensor) -> Tensor:
    m.counted.add_(1.0)
    return F.pad(m.counted, (0, 0, 0, x.shape[1] - 2))


@pytest.mark.parametrize(
    "table",
    [
        lambda m, x: F.interpolate((m.rows + x.sum()).t()[None], size=x.shape[1])[
            0
        ].t(),  # not of the length alone
        lambda m, x: F.pad(torch.rand(2, WIDTH, dtype=x.dtype), (0, 0, 0, x.shape[1] - 2)),
        _of_a_written_buffer,
    ],
)
def test_other_rows_are_refused(table: Table) -> None:
    assert_refused(lambda: Model(table), _inputs, world_size=2, error=ZecoError, match="test_length_tables")
