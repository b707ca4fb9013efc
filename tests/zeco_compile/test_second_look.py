"""Numbers that come from the length, and steps that are special, where the length is a constant in the trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeco_compile.another_length import lengthened
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.testing import assert_equivalent, assert_refused


class Model(nn.Module):
    def __init__(
        self, after: Callable[[Tensor, Tensor], Tensor], step: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.after, self.step = after, step

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(2, 6), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.a(x[:, t])) * h + self.b(x[:, t])
            outputs.append(h if self.step is None else self.step(h, t))
        return self.after(torch.stack(outputs, 1), x)


OF_TOTALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum / T": lambda y, x: y.sum(1) / x.shape[1],
    "sum / (T + 1)": lambda y, x: y.sum(1) / (x.shape[1] + 1),
    "sum / (T // 2)": lambda y, x: y.sum(1) / (x.shape[1] // 2),
    "loss / T": lambda y, x: F.mse_loss(y, x, reduction="sum") / x.shape[1],
    "product of means": lambda y, x: (y.sum(1) / float(x.shape[1])) * (x.sum(1) / float(x.shape[1])),
}


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("name", OF_TOTALS)
def test_number_that_a_total_is_computed_with_is_that_of_the_whole_sequence(name: str, length: int) -> None:
    after = OF_TOTALS[name]
    found = assert_equivalent(
        lambda: Model(after), lambda: torch.randn(2, 2 * length, 6, dtype=torch.float64), world_size=2
    )
    assert len(found.regions) == 1


FROM_THE_LENGTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y / sqrt(T)": lambda y, x: y / math.sqrt(x.shape[1]),
    "y * log(T)": lambda y, x: y * math.log(x.shape[1]),
    "positions / T": lambda y, x: y * (torch.arange(x.shape[1], dtype=x.dtype) / x.shape[1])[:, None],
    "positions from the end": lambda y, x: y * torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype)[:, None],
    "filled with T": lambda y, x: y + torch.full((6,), x.shape[1], dtype=x.dtype),
}


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("name", FROM_THE_LENGTH)
def test_number_from_the_length_is_refused(name: str, length: int) -> None:
    after = FROM_THE_LENGTH[name]
    (message, _) = assert_refused(
        lambda: Model(after),
        lambda: torch.randn(2, 2 * length, 6, dtype=torch.float64),
        world_size=2,
        error=LengthInValue,
        match="longer sequence",
    )
    assert f"for {2 * length} tokens instead of {length}" in message
    assert "test_second_look.py" in message


STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "first four": lambda h, t: torch.tanh(h) if t < 4 else h,
    "every fourth": lambda h, t: torch.tanh(h) if t % 4 == 0 else h,
    "by its number": lambda h, t: h / (t + 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_special_step_is_refused(name: str) -> None:
    step = STEPS[name]
    assert_refused(
        lambda: Model(lambda y, x: y, step),
        lambda: torch.randn(2, 8, 6, dtype=torch.float64),
        world_size=2,
        match="sequence",
    )


@pytest.mark.parametrize("length", [4, 9])
def test_numbers_that_look_like_the_length_are_no_harm(length: int) -> None:
    """4 = T, 9 = T, 3 = sqrt(T), 2 = sqrt(T) = T / 2, as scales, widths and exponents."""

    def after(y: Tensor, x: Tensor) -> Tensor:
        return (y * 4 / 9 + 3.0) ** 2 / 3 + (y.square().sum(1, keepdim=True) * 0.5 / 4)

    inputs = lambda: torch.randn(2, 2 * length, 6, dtype=torch.float64)  # noqa: E731
    found = assert_equivalent(lambda: Model(after), inputs, world_size=2)
    assert len(found.regions) == 1


def test_the_function_is_not_run_and_keeps_its_state() -> None:
    """The second trace is of the same Python function: what it does to Python objects is not done twice."""

    class Counting(Model):
        def __init__(self) -> None:
            super().__init__(lambda y, x: y)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + self.calls

    inputs = lambda: torch.randn(2, 6, 6, dtype=torch.float64)  # noqa: E731
    assert_equivalent(Counting, inputs, world_size=2)


def test_slices_that_are_views_of_the_whole() -> None:
    """`x.chunk(world_size, dim=1)[rank]` is not contiguous, and `nn.Linear` takes another way with it."""
    found = assert_equivalent(
        lambda: Model(lambda y, x: y),
        lambda: torch.randn(2, 8, 6, dtype=torch.float64),
        world_size=2,
        contiguous=False,
    )
    assert [region["family"] for region in found.regions] == ["per head and token"]


@pytest.mark.parametrize(
    ("tensor", "along"),
    [
        (torch.arange(24.0).view(2, 4, 3), 1),
        (torch.arange(48.0).view(2, 8, 3)[:, 4:], 1),
        (torch.arange(48.0).view(2, 3, 8)[:, :, 4:].mT, 1),
        (torch.arange(96.0).view(2, 3, 8, 2)[:, :, :4], 2),
        (torch.arange(96.0).view(2, 8, 3, 2)[:, 4:].transpose(1, 2), 2),
        (torch.arange(4.0)[None, :, None].expand(2, 4, 3), 1),
        (torch.arange(6.0)[:, None].expand(6, 4), 1),
        (torch.arange(48.0).view(2, 8, 3)[:, :1], 1),
        (torch.arange(6.0).view(2, 1, 3), 1),
        (torch.arange(4), 0),
    ],
)
def test_longer_inputs_have_the_layout_of_those_given(tensor: Tensor, along: int) -> None:
    longer = lengthened(tensor, along, 2 * tensor.shape[along])
    assert torch.equal(longer, torch.cat([tensor, tensor], along))
    assert longer.is_contiguous() == tensor.is_contiguous()
    assert [stride == 0 for stride in longer.stride()] == [stride == 0 for stride in tensor.stride()]
    several = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    order, wanted = (sorted(several, key=each.stride) for each in (longer, tensor))
    assert order == wanted
    for dim in range(tensor.dim() - 1):  # two dimensions can be viewed as one, or cannot, as before
        if dim in several and dim + 1 in several:
            merged = [
                each.stride(dim) == each.stride(dim + 1) * each.shape[dim + 1] for each in (longer, tensor)
            ]
            assert merged[0] == merged[1]


def _loop(x: Tensor) -> Tensor:
    h, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


class Keeping(nn.Module):
    """Keeps what `note` makes of the length, in one of the ways that Python has."""

    def __init__(self, way: str, note: Callable[[int], int]) -> None:
        super().__init__()
        self.way, self.note = way, note
        self.seen, self.by_name, self.lengths = 0, {"seen": 0}, [0]

    def forward(self, x: Tensor) -> Any:
        number = self.note(x.shape[1])
        if self.way == "attribute":
            self.seen += number
        elif self.way == "dict":
            self.by_name["seen"] += number
        elif self.way == "list":
            self.lengths.append(number)
        else:
            return _loop(x), {"tokens": number}
        return _loop(x)


WAYS = ["attribute", "dict", "list", "returned"]


@pytest.mark.parametrize("way", WAYS)
def test_number_from_the_length_that_stays_in_python_is_refused(way: str) -> None:
    assert_refused(
        lambda: Keeping(way, lambda length: length),
        lambda: torch.randn(2, 8, 3, dtype=torch.float64),
        world_size=2,
        error=LengthInValue,
        match="returns this number, or keeps it",
    )


@pytest.mark.parametrize("way", WAYS)
def test_number_of_calls_may_stay_in_python(way: str) -> None:
    assert_equivalent(
        lambda: Keeping(way, lambda length: 1),
        lambda: torch.randn(2, 8, 3, dtype=torch.float64),
        world_size=2,
    )
