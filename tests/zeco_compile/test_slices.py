"""What a compiled call has returned and the model keeps is a slice of the sequence for the calls to come, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeco_compile import errors
from zeco_compile.testing import run_on_ranks

WIDTH = 4


def linear_attention(x: Tensor) -> Tensor:
    T = x.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    q, k, v = x * 0.5, x.tanh(), x + 1
    return (q @ k.transpose(1, 2)).masked_fill(~seen, 0) @ v


class Keeps(nn.Module):
    """Adds the mean of what it returned the last time, kept in an attribute, a list or a dictionary."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.last, self.many, self.named = where, None, [], {}

    def forward(self, x: Tensor) -> Tensor:
        old = {"attribute": self.last, "list": self.many[-1] if self.many else None,
               "dictionary": self.named.get("last")}[self.where]  # fmt: skip
        if old is not None:
            x = x + old.mean(1, keepdim=True)
        y = linear_attention(x)
        if self.where == "attribute":
            self.last = y.detach()
        elif self.where == "list":
            self.many.append(y.detach())
        else:
            self.named["last"] = y.detach()
        return y


class Angles(nn.Module):
    """Makes its table of angles anew only where it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        if self.table is None or self.table.shape[0] < T:
            self.table = torch.cos(torch.arange(T, dtype=x.dtype)[:, None] * torch.ones(WIDTH, dtype=x.dtype))
        return linear_attention(x * self.table[:T])


class Remembers(nn.Module):
    """Adds a row that somebody else sets, and gives back rows of its own table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0 * WIDTH).view(64, WIDTH).double() / 100)
        self.row: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.row is not None:
            x = x + self.row
        rows = self.table[: x.shape[1]]
        return linear_attention(x + rows), rows


def _calls(
    make: Callable[[], nn.Module], lengths: list[int], between: Callable[[Any, Any], None]
) -> list[Any]:
    """Per call the largest difference from the same calls of the unsharded model, or the error's class and message."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = make()
    model = copy.deepcopy(reference)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zeco", fullgraph=True, options={"codegen": "aot_eager"})
    outcomes: list[Any] = []
    for number, length in enumerate(lengths):
        x = torch.randn(2, length * size, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        wanted = reference(x)
        try:
            got = compiled(x.chunk(size, 1)[rank].contiguous())
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
            break
        first, expected = (got, wanted) if isinstance(got, Tensor) else (got[0], wanted[0])
        outcomes.append(float((first - expected.chunk(size, 1)[rank]).abs().max()))
        between(model, got)
        between(reference, wanted)
    return outcomes


def _nothing(model: Any, got: Any) -> None:
    pass


@pytest.mark.parametrize("where", ["attribute", "list", "dictionary"])
def test_what_a_model_keeps_is_a_slice_at_the_next_call(where: str) -> None:
    for outcomes in run_on_ranks(_calls, lambda: Keeps(where), [6, 6, 6], _nothing, world_size=2):
        assert len(outcomes) == 3
        assert max(outcomes) < 1e-9


def test_a_table_of_another_length_is_refused() -> None:
    for outcomes in run_on_ranks(_calls, Angles, [8, 4], _nothing, world_size=2):
        assert outcomes[0] < 1e-9
        name, message = outcomes[1]
        assert name == errors.SequenceInputError.__name__
        assert "table" in message


def test_a_view_taken_outside_is_refused() -> None:
    def keep_last_row(model: Any, got: Any) -> None:
        model.row = got[0][:, -1:].detach()

    for outcomes in run_on_ranks(_calls, Remembers, [5, 5], keep_last_row, world_size=2):
        assert outcomes[0] < 1e-9
        name, message = outcomes[1]
        assert name == errors.SequenceInputError.__name__
        assert "row" in message
        assert "view of what a compiled call has returned" in message


def test_rows_of_a_table_that_are_returned_do_not_make_the_table_a_slice() -> None:
    for outcomes in run_on_ranks(_calls, Remembers, [5, 5, 7], _nothing, world_size=2):
        assert len(outcomes) == 3
        assert max(outcomes) < 1e-9
