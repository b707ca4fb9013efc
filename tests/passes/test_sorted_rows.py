"""Rows that are sorted by expert and sorted back are left alone; whatever else is made of their order is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zeco_compile.passes.analysis import analyse
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.sorted_rows import departure
from zeco_compile.testing import assert_equivalent, assert_refused

pytest.importorskip("transformers.integrations.moe")  # whose grouped product is for any type

EXPERTS, WIDTH = 3, 6


class At:
    """What there is at a place in the forward, by name."""


class Experts(nn.Module):
    """Each token's `k` experts, by one sort of the pairs of a token and an expert.

    Of the order, the rows in this order, the counts and so on, a test changes something: `before` the
    products, or `back`, where rows are put back.
    """

    def __init__(
        self,
        back: Callable[[At], Tensor],
        before: Callable[[At], object] = lambda at: None,
        k: int = 2,
    ) -> None:
        import transformers.integrations.moe  # noqa: F401  (on the rank, too: it registers the grouped product)

        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.back, self.before, self.k = back, before, k

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        at = At()
        at.extra = ()
        at.x, at.k = x.reshape(-1, WIDTH), self.k
        at.probs = self.router(at.x).softmax(-1)
        weight, chosen = at.probs.topk(self.k, -1)
        at.weight, at.chosen = weight.reshape(-1), chosen.reshape(-1)
        at.keys, at.order = torch.sort(at.chosen)
        at.rows = at.x[at.order // self.k]
        at.counts = torch.histc(at.keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        at.ends = at.counts.cumsum(0, dtype=torch.int32)
        self.before(at)
        at.rows = torch.ops.transformers.grouped_mm_fallback(at.rows, self.up, at.ends)
        at.rows = (at.rows + self.bias[at.keys]) * at.weight[at.order][:, None]
        return self.back(at).view(x.shape) + x, *at.extra


def _sum(at: At, pairs: Tensor) -> Tensor:
    return pairs.view(-1, at.k, WIDTH).sum(1)


def _inverse_written(at: At) -> Tensor:
    inverse = torch.empty_like(at.order)
    inverse[at.order] = torch.arange(at.order.size(0))
    return _sum(at, at.rows[inverse])


def _rows_written(at: At) -> Tensor:
    pairs = torch.empty_like(at.rows)
    pairs[at.order] = at.rows
    return _sum(at, pairs)


BACK: dict[str, Callable[[At], Tensor]] = {
    "the inverse is written": _inverse_written,
    "the order is sorted": lambda at: _sum(at, at.rows[at.order.argsort()]),
    "the rows are written": _rows_written,
    "they are added to their tokens": lambda at: torch.zeros_like(at.x).index_add(
        0, at.order // at.k, at.rows
    ),
    "they are added in a new tensor": lambda at: at.x.new_zeros(len(at.x), WIDTH).index_add_(
        0, at.order // at.k, at.rows
    ),
}


def _put(**values: Callable[[At], object]) -> Callable[[At], None]:
    def change(at: At) -> None:
        for name, value in values.items():
            setattr(at, name, value(at))

    return change


def _inputs() -> Tensor:
    return torch.randn(2, 12, WIDTH, dtype=torch.float64)


def _departures(model: nn.Module) -> list[str | None]:
    """Of every sort of rows, why it is not undone."""
    found: list[str | None] = []

    def look(gm: fx.GraphModule, example_inputs: list[Tensor]) -> fx.GraphModule:
        analysis = analyse(gm, example_inputs, 1)
        assert analysis is not None
        found.extend(
            departure(analysis, n)
            for n in analysis.shadow.graph.nodes
            if n.target is torch.ops.aten.sort.default
        )
        return gm

    torch._dynamo.reset()
    torch.compile(model.double(), backend=look, fullgraph=True)(_inputs())
    return found


@pytest.mark.parametrize("name", BACK)
def test_sorted_and_sorted_back(name: str) -> None:
    found = assert_equivalent(lambda: Experts(BACK[name]), _inputs, world_size=2)
    assert len(found.decisions("position-local")) == 1
    assert not found.reports[0]["communication"]


CHANGES: dict[str, Callable[[At], None]] = {
    "counts of what is sorted": _put(
        ends=lambda at: torch.histc(at.chosen.float(), EXPERTS, 0, EXPERTS).cumsum(0, dtype=torch.int32)
    ),
    "a norm of each row": _put(rows=lambda at: F.layer_norm(at.rows, (WIDTH,))),
    "a count for the loss": _put(
        extra=lambda at: (torch.histc(at.chosen.float(), EXPERTS, 0, EXPERTS) * at.probs.mean(0),)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_to_each_row(name: str) -> None:
    assert_equivalent(lambda: Experts(_inverse_written, CHANGES[name]), _inputs, world_size=2)


def test_one_token_per_rank() -> None:
    assert_equivalent(
        lambda: Experts(_inverse_written), lambda: torch.randn(2, 3, WIDTH, dtype=torch.float64), world_size=3
    )


DEPARTURES: dict[str, tuple[Callable[[At], None], str]] = {
    "a capacity": (
        _put(
            places=lambda at: torch.arange(at.order.size(0)) - (at.ends - at.counts)[at.keys],
            rows=lambda at: at.rows * (at.places < 3)[:, None],
        ),
        "computes with",
    ),
    "the first rows": (_put(rows=lambda at: F.pad(at.rows[:9], (0, 0, 0, at.order.size(0) - 9))), "slice"),
    "the number of a place": (
        _put(rows=lambda at: at.rows * torch.arange(at.order.size(0))[:, None]),
        "another one|place of a row",
    ),
    "the number of a row": (
        _put(rows=lambda at: at.rows * at.order[:, None]),
        "computes with the number of the row",
    ),
    "the rows before": (_put(rows=lambda at: at.rows.cumsum(0)), "other rows"),
    "a norm over all rows": (_put(rows=lambda at: at.rows - at.rows.mean(0)), "other rows"),
    "a norm over tokens": (_put(rows=lambda at: at.rows.T.softmax(-1).T), "other rows"),
    "the next row": (_put(rows=lambda at: at.rows + at.rows.roll(1, 0)), "other rows"),
    "pairs of places": (
        _put(rows=lambda at: at.rows.view(-1, 2, WIDTH).flip(1).reshape(-1, WIDTH)),
        "takes the rows apart",
    ),
    "another order": (_put(rows=lambda at: at.rows * at.weight[:, None]), "rows in another one"),
    "the order once more": (_put(rows=lambda at: at.rows[at.order]), "does not have them"),
    "tokens that are not its own": (_put(rows=lambda at: at.x.repeat(2, 1)[at.order]), "does not have them"),
    "counts that are returned": (_put(extra=lambda at: (at.counts,)), "returns how many"),
    "counts in a loss": (
        _put(extra=lambda at: ((at.counts / at.counts.sum() * at.probs.mean(0)).sum(),)),
        "computes with how many",
    ),
    "rows that are returned": (_put(extra=lambda at: (at.rows.sum(0),)), "other rows"),
    "groups of other keys": (
        _put(ends=lambda at: (at.counts * 1).cumsum(0, dtype=torch.int32)),
        "computes with how many",
    ),
    "bins from the values": (
        _put(ends=lambda at: torch.histc(at.keys.float(), EXPERTS).cumsum(0, dtype=torch.int32)),
        "depend on the values",
    ),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_the_order_is_used_otherwise(name: str) -> None:
    before, why = DEPARTURES[name]
    (text,) = _departures(Experts(_inverse_written, before))
    assert text is not None
    assert re.search(
        rf"(?s)not sorted back in a way that is followed: at \S*test_sorted_rows\.py:\d+ .*({why})", text
    )


NOT_BACK: dict[str, Callable[[At], Tensor]] = {
    "not at all": lambda at: _sum(at, at.rows),
    "by the order itself": lambda at: _sum(at, at.rows[at.order]),
    "added to other tokens": lambda at: torch.zeros_like(at.x).index_add(0, at.order % len(at.x), at.rows),
}


@pytest.mark.parametrize("name", NOT_BACK)
def test_rows_do_not_come_back(name: str) -> None:
    assert all(_departures(Experts(NOT_BACK[name])))


def test_a_number_from_the_length_is_refused() -> None:
    def back(at: At) -> Tensor:
        return torch.zeros_like(at.x).index_add(0, at.order // at.k, at.rows, alpha=1 / at.order.size(0))

    assert_refused(
        lambda: Experts(back),
        _inputs,
        world_size=2,
        error=UnsupportedOp,
        match="takes a number from the length",
    )


def test_a_departure_is_refused_with_its_line() -> None:
    assert_refused(
        lambda: Experts(_inverse_written, DEPARTURES["a capacity"][0]),
        _inputs,
        world_size=2,
        error=UnsupportedOp,
        match=r"not sorted back in a way that is followed: at \S*test_sorted_rows\.py:\d+",
    )


def test_keys_below_the_first_bin_are_counted_nowhere() -> None:
    class Signed(Experts):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            keys, order = torch.sort((x[..., 0] * 2).long().reshape(-1))
            ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS).cumsum(0, dtype=torch.int32)
            rows = torch.ops.transformers.grouped_mm_fallback(x.reshape(-1, WIDTH)[order], self.up, ends)
            return (rows[order.argsort()].view(x.shape),)

    assert_refused(
        lambda: Signed(_inverse_written),
        _inputs,
        world_size=2,
        error=UnsupportedOp,
        match="all keys are 0 at least",
    )


def test_a_histogram_of_all_positions() -> None:
    def model(x: Tensor) -> Tensor:
        return x * torch.histc(x.detach().reshape(-1), 4, -1, 1).to(x.dtype).sum()

    assert_equivalent(lambda: model, _inputs, world_size=2)
    assert_refused(
        lambda: lambda x: x * torch.histc(x.detach().reshape(-1), 4).to(x.dtype)[0], _inputs, world_size=2
    )


def test_experts_that_choose_their_tokens() -> None:
    def model(x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        _, tokens = flat[:, :EXPERTS].topk(4, 0)
        return torch.zeros_like(flat).index_add(0, tokens[:, 0], flat[tokens[:, 0]] * 2).view(x.shape)

    assert_refused(lambda: model, _inputs, world_size=2, error=UnsupportedOp, match="topk")
