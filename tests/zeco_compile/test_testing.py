"""The harness itself: right models pass, wrong ones are caught, and nothing that a rank does hangs it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeco_compile import marks
from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering import exchange
from zeco_compile.testing import (
    HarnessError,
    NotEquivalent,
    NotRefused,
    RankDied,
    RankFailed,
    RankTimedOut,
    assert_equivalent,
    assert_refused,
    run_on_ranks,
)
from zeco_compile.testing.inputs import from_user, slices


class PositionLocal(nn.Module):
    """Computes the same on a slice as on the whole; one buffer, one unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        y = torch.tanh(self.inner(x))
        return {"y": y if scale is None else y * scale}


def sequence_input() -> Tensor:
    return torch.randn(2, 12, 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_position_local_model_passes(world_size: int) -> None:
    found = assert_equivalent(PositionLocal, sequence_input, world_size=world_size, _backend="eager")
    assert set(found.worst) == {"output", "input gradient", "parameter gradient", "buffer"}
    assert all(each.relative < 1e-14 for each in found.worst.values())
    assert found.output_dims == ((1,) if world_size > 1 else (None,))


def test_whole_inputs_and_keyword_inputs() -> None:
    def inputs() -> tuple[tuple[Tensor], dict[str, Tensor]]:
        # Five values that every rank holds, in a shape that would be cut if it were not marked.
        return (torch.randn(2, 12, 6),), {"scale": marks.mark_sequence(torch.randn(1, 1, 5), None)}

    found = assert_equivalent(PositionLocal, inputs, world_size=2, _backend="eager")
    summed = [each for each in found.differences if each.kind == "input gradient" and "sum" in each.where]
    assert [each.name for each in summed] == ["scale"]


def test_marked_dimension_and_plain_function() -> None:
    def inputs() -> tuple[Tensor, Tensor, int]:
        return torch.randn(2, 12, 6), marks.mark_sequence(torch.randn(3, 2, 12), 2), 4

    def function(x: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
        return x * n, positions.cos(), n

    found = assert_equivalent(lambda: function, inputs, world_size=2, _backend="eager")
    assert found.output_dims == (1, 2)


def test_float32_with_a_float64_reference() -> None:
    found = assert_equivalent(
        PositionLocal,
        sequence_input,
        world_size=2,
        dtype=torch.float32,
        reference_dtype=torch.float64,
        _backend="eager",
    )
    assert 0 < found.worst["output"].relative < 1e-6


def test_sum_over_the_sequence_is_caught_on_every_rank() -> None:
    with pytest.raises(NotEquivalent, match=r"output 'output', rank 0: relative error") as caught:
        assert_equivalent(lambda: lambda x: x.sum(1), sequence_input, world_size=2, _backend="eager")
    assert "rank 1: relative error" in str(caught.value)


class WrongGradientOnRankOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        wrong = dist.get_world_size() > 1 and dist.get_rank() == 1 and grad.shape[1] == 6
        return grad * (2.0002 if wrong else 2)


def test_wrong_gradient_on_one_rank_is_caught_there() -> None:
    def model() -> nn.Module:
        linear = nn.Linear(6, 6)
        forward = linear.forward
        linear.forward = lambda x: forward(WrongGradientOnRankOne.apply(x))
        return linear

    with pytest.raises(NotEquivalent, match=r"input gradient 'args\[0\]', rank 1: relative error 0.0001"):
        assert_equivalent(model, sequence_input, world_size=2, _backend="eager")


def test_wrong_parameter_gradient_is_caught_in_the_sum() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * WrongGradientOnRankOne.apply(self.weight.expand_as(x))

    with pytest.raises(NotEquivalent, match=r"parameter gradient 'weight', sum over ranks \(.*by rank: "):
        assert_equivalent(Model, sequence_input, world_size=2, _backend="eager")


def test_gradient_of_a_replicated_output_counts_once() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * 3 + 0 * x[0, 0]

    # The same value on every rank, so each rank's cotangent is its share, and the sum is the whole gradient.
    with pytest.raises(NotEquivalent) as caught:
        assert_equivalent(Pooled, sequence_input, world_size=2, output_dims=[0], _backend="eager")
    assert "shape (6,), expected (3,)" in str(caught.value)
    assert_equivalent(Pooled, sequence_input, world_size=2, _backend="eager")


def test_sequence_output_that_comes_back_whole_is_rejected() -> None:
    def gathered(x: Tensor) -> Tensor:
        whole = torch.empty(2, 12, 6, dtype=x.dtype)
        if x.shape[1] == 12:
            return x * 1
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.detach().contiguous())
        return torch.cat(parts, 1, out=whole)

    with pytest.raises(NotEquivalent, match="came back whole on every rank"):
        assert_equivalent(
            lambda: gathered, sequence_input, world_size=2, backward=False, fullgraph=False, _backend="eager"
        )


def test_wrong_buffer_is_caught() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.copy_(x.detach().mean((0, 1)))
            return x + 1

    with pytest.raises(NotEquivalent, match="buffer 'mean', rank 1"):
        assert_equivalent(Statistics, sequence_input, world_size=2, _backend="eager")


@pytest.mark.parametrize("where", ["both", "slice"])
def test_nan_passes_only_where_the_reference_has_it(where: str) -> None:
    def function(x: Tensor) -> Tensor:
        bad = where == "both" or x.shape[1] == 6
        return torch.cat([torch.full_like(x[:, :, :1], float("nan") if bad else 1.0), x[:, :, 1:]], 2)

    def run() -> None:
        assert_equivalent(lambda: function, sequence_input, world_size=2, _backend="eager")

    if where == "both":
        run()
    else:
        with pytest.raises(
            NotEquivalent, match=r"12 of 72 elements differ in being NaN or infinite; at \[0, 0"
        ):
            run()


def test_other_structure_is_rejected() -> None:
    def function(x: Tensor) -> object:
        return (x, x) if x.shape[1] == 12 else [x]

    with pytest.raises(ZecoError, match="the compiled model returned"):
        assert_equivalent(lambda: function, sequence_input, world_size=2, _backend="eager")


def test_output_whose_tensors_are_hidden_is_the_callers_mistake() -> None:
    @dataclasses.dataclass
    class Output:
        logits: Tensor

    with pytest.raises(HarnessError, match=r"Output, whose tensors the harness does not see: register it"):
        assert_equivalent(lambda: lambda x: Output(x * 2), sequence_input, world_size=2, _backend="eager")


def test_length_that_does_not_divide_is_the_callers_mistake() -> None:
    with pytest.raises(HarnessError, match="12 positions in dimension 1, which 5 ranks cannot share"):
        slices(from_user(sequence_input()), 1, 0, 5, None)


def _refuse(x: Tensor) -> Tensor:
    if x.shape[1] != 12:
        raise ZecoError(f"refused on a slice of {x.shape[1]}")
    return x


def test_refusal_on_every_rank() -> None:
    messages = assert_refused(
        lambda: torch.compiler.disable(_refuse),
        sequence_input,
        world_size=2,
        match="refused on",
        fullgraph=False,
        lengths=[5, 7],
        _backend="eager",
    )
    assert messages == ["refused on a slice of 5", "refused on a slice of 7"]


def test_refusal_missing_on_one_rank() -> None:
    def run() -> None:
        assert_refused(
            lambda: torch.compiler.disable(_refuse),
            sequence_input,
            world_size=2,
            lengths=[12, 0],
            fullgraph=False,
            _backend="eager",
        )

    with pytest.raises(NotRefused, match=r"rank 0 ran, and returned \['torch.float64 \[2, 12, 6\]'\]"):
        run()


def test_another_kind_of_error_is_no_refusal() -> None:
    def function(x: Tensor) -> Tensor:
        if x.shape[1] != 12:
            raise ValueError("not typed")
        return x

    with pytest.raises(NotRefused, match="rank 1 raised ValueError: not typed"):
        assert_refused(
            lambda: torch.compiler.disable(function),
            sequence_input,
            world_size=2,
            fullgraph=False,
            _backend="eager",
        )


class LocalError(ZecoError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _raise_typed() -> None:
    raise LocalError(dist.get_rank(), 7)


def test_typed_error_keeps_its_class_and_the_remote_traceback() -> None:
    with pytest.raises(LocalError, match="0 and 7") as caught:
        run_on_ranks(_raise_typed, world_size=2)
    assert "in _raise_typed" in str(caught.value.__cause__)


def test_foreign_error_names_rank_and_traceback() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("one of two")

    with pytest.raises(RankFailed, match=r"rank 1 raised ValueError: one of two\n(.|\n)*in fail"):
        run_on_ranks(fail, world_size=2)


def test_rank_that_hangs_is_named_with_its_traceback() -> None:
    def sleeper() -> None:
        if dist.get_rank() == 1:
            while True:
                time.sleep(0.1)

    start = time.monotonic()
    with pytest.raises(RankTimedOut, match=r"^rank 1 did not answer in time\n(.|\n)*in sleeper"):
        run_on_ranks(sleeper, world_size=2, timeout=3.0)
    assert time.monotonic() - start < 60
    assert run_on_ranks(dist.get_rank, world_size=2) == [0, 1]


def test_rank_that_dies_is_named_and_the_pool_starts_again() -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied, match=r"rank 1 died\n(.|\n)*killed by SIGKILL"):
        run_on_ranks(die, world_size=2)
    assert run_on_ranks(dist.get_rank, world_size=2) == [0, 1]


def test_outcomes_of_a_lost_neighbour() -> None:
    def exchange() -> None:
        if dist.get_rank() == 0:
            os._exit(3)
        dist.barrier()

    outcomes = run_on_ranks(exchange, world_size=2, group_timeout=5.0, check=False)
    assert [outcome.status for outcome in outcomes] == ["died", "raised"]
    assert "exit code 3" in outcomes[0].traceback


def test_processes_are_kept_between_calls() -> None:
    first = run_on_ranks(os.getpid, world_size=2)
    assert run_on_ranks(os.getpid, world_size=2) == first
    with pytest.raises(LocalError):
        run_on_ranks(_raise_typed, world_size=2)
    assert run_on_ranks(os.getpid, world_size=2) == first, "all ranks refused alike: no reason to start anew"


def _its_own_file() -> str:
    return _its_own_file.__code__.co_filename


def test_a_function_keeps_its_file() -> None:
    inner = lambda: (lambda: 0).__code__.co_filename  # noqa: E731
    assert run_on_ranks(_its_own_file, world_size=1) == [__file__]
    assert run_on_ranks(inner, world_size=1) == [__file__]


def test_unpicklable_result_is_an_error_of_its_rank() -> None:
    def generator() -> object:
        return (i for i in range(3))

    with pytest.raises(RankFailed, match="cannot be sent back"):
        run_on_ranks(generator, world_size=1)


def test_error_message_is_sorted_by_size() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        off = 0 if x.shape[1] == 12 else 1
        return x + off * 1e-3, x + off * 1e-6

    with pytest.raises(NotEquivalent) as caught:
        assert_equivalent(lambda: two, sequence_input, world_size=2, _backend="eager")
    assert re.search(r"output\[0\].*\n.*output\[0\].*\n.*output\[1\]", str(caught.value))


def _pooled(x: Tensor, exact: bool) -> Tensor:
    total = x.square().sum(1)
    if x.shape[1] == 12:
        return total
    group = dist.group.WORLD.group_name
    if exact:
        return exchange.all_sum(total, group)
    return total + (exchange.all_sum(total, group) - total).detach()


def test_exact_adjoint_of_a_sum_over_ranks_passes_and_a_local_one_does_not() -> None:
    def run(exact: bool) -> None:
        assert_equivalent(
            lambda: torch.compiler.disable(lambda x: _pooled(x, exact)),
            sequence_input,
            world_size=2,
            fullgraph=False,
            _backend="eager",
        )

    run(exact=True)
    with pytest.raises(NotEquivalent, match=r"2 of 4 tensors(.|\n)*input gradient(.|\n)*relative error 0\.5"):
        run(exact=False)
