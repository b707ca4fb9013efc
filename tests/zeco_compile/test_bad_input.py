"""What is wrong with an input, a group, a rank or a model is an error on every rank, soon, and says what it is.

Nothing falls back to eager, which on a slice of the sequence would be a wrong number, and nothing hangs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeco_compile
from zeco_compile import errors
from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.settings import option_names
from zeco_compile.testing import Outcome, assert_equivalent, assert_refused, run_on_ranks

SECONDS = 45.0
"""What "within seconds" means on a machine that does other things as well."""

Attempt = tuple[str, str]


def line_of(marker: str) -> str:
    """``file:line`` of the line of this file that ends in ``# <marker>``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if line.endswith(f"# {marker}"))
    return f"{__file__}:{number}"


def attempt(function: Callable[[], Any]) -> Attempt:
    """The class and the message of what `function` raises; ("returned", ...) if it does not."""
    try:
        return "returned", str(function())
    except Exception as error:
        return type(error).__name__, str(error)


def compiled(model: Callable[..., Any], *, fullgraph: bool = True, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(
        model, backend="zeco", fullgraph=fullgraph, options={"codegen": "aot_eager", **options}
    )


def dynamo_config(**values: Any) -> Any:
    from torch import _dynamo  # cloudpickle cannot send a function that names torch._dynamo.config

    return _dynamo.config.patch(**values)


def attention(x: Tensor) -> Tensor:
    """Linear attention without a decay, one head."""
    q, k, v = x.chunk(3, -1)
    return torch.tril(q @ k.mT) @ v


def by_name(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return zeco_compile.gated_linear_attention(q, k, v, g)


def position_local(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def mixes(x: Tensor) -> Tensor:
    return x + torch.sort(x, 1)[0]  # this line mixes


def rows(length: int = 6) -> Tensor:
    return torch.randn(2, length, 6, dtype=torch.float64)


# -------------------------------------------------------------------------------------------- options and groups


def test_unknown_option_lists_the_options() -> None:
    with pytest.raises(errors.InvalidOption, match="'sequence_dim' does not exist") as caught:
        torch.compile(position_local, backend="zeco", options={"sequence_dim": 1})(rows())
    for name in option_names():
        assert name in str(caught.value)


def _with_group(kind: str) -> Attempt:
    group: Any = {"text": "tp", "list": [0, 1], "module": nn.Linear(1, 1)}.get(kind)
    if kind.startswith("mesh"):
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        group = mesh if kind == "mesh" else mesh["cp"]
    return attempt(lambda: compiled(attention, group=group)(rows()).shape)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("text", "'tp' (a str)"),
        ("list", "[0, 1] (a list)"),
        ("module", "(a Linear)"),
        ("mesh", "DeviceMesh of 2 dimensions"),
    ],
)
def test_group_that_is_none(kind: str, says: str) -> None:
    for name, message in run_on_ranks(_with_group, kind, world_size=2):
        assert name == "InvalidGroup"
        assert says in message


def test_one_dimension_of_a_mesh_is_a_group() -> None:
    assert (
        run_on_ranks(_with_group, "mesh, sliced", world_size=2) == [("returned", "torch.Size([2, 6, 2])")] * 2
    )


# -------------------------------------------------------------------------------------------------------- inputs


def test_input_that_lacks_the_sequence_dimension() -> None:
    messages = assert_refused(
        lambda: position_local,
        rows,
        world_size=2,
        seq_dim=3,
        error=errors.SequenceInputError,
        match=r"input `.*x.*` of shape \[2, 6, 6\]: it has no dimension 3",
    )
    assert all("mark_sequence" in message for message in messages)


def _different_inputs() -> Attempt:
    model = compiled(lambda x, y: (attention(x), attention(y)))
    return attempt(lambda: model(rows(6), rows(5)))


def test_inputs_of_different_lengths_on_one_rank() -> None:
    for name, message in run_on_ranks(_different_inputs, world_size=2):
        assert name == "SequenceInputError"
        assert "`L['y']` of shape [2, 5, 6]: dimension 1 has 5 rows" in message
        assert "`L['x']` (dimension 1) has 6" in message


def _unequal(when: str, model: Callable[..., Any], dynamic: bool | None) -> tuple[Attempt, float]:
    torch._dynamo.reset()
    function = torch.compile(
        model, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )
    if when == "later":
        for _ in range(2):
            function(rows(6))
    x = rows(6 - dist.get_rank() % 2)
    start = time.monotonic()
    return attempt(lambda: function(x)), time.monotonic() - start


@pytest.mark.parametrize("model", [attention, position_local])
@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("when", ["first", "later"])
def test_shards_of_unequal_length(when: str, dynamic: bool | None, model: Callable[..., Any]) -> None:
    answers = run_on_ranks(_unequal, when, model, dynamic, world_size=3)
    for (name, message), seconds in answers:
        assert name == "UnequalShards"
        assert "rank 1: 5; ranks 0, 2: 6" in message
        assert seconds < SECONDS


def _unequal_once(first: list[int]) -> list[Attempt]:
    torch._dynamo.reset()
    model = compiled(attention)

    def call(length: int) -> Attempt:
        return attempt(lambda: model(rows(length)).shape)

    return [call(length) for length in (first[dist.get_rank()], 6, 8, 6, 7)]


@pytest.mark.parametrize("first", [[6, 5], [5, 6]])
def test_what_follows_shards_of_unequal_length(first: list[int]) -> None:
    """Dynamo has seen two lengths on one rank, and one on the other: their code is alike all the same."""
    for refused, *others in run_on_ranks(_unequal_once, first, world_size=2):
        assert refused[0] == "UnequalShards"
        assert others == [("returned", f"torch.Size([2, {n}, 2])") for n in (6, 8, 6, 7)]


def _given(dynamic: bool | None, calls: list[list[tuple[int, float]]]) -> list[Attempt]:
    torch._dynamo.reset()

    def model(x: Tensor, factor: float) -> Tensor:
        return attention(x * factor)

    function = torch.compile(
        model, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )

    def call(batch: int, factor: float) -> Attempt:
        return attempt(lambda: function(rows(6).repeat(batch, 1, 1), factor).shape)

    return [call(*each[dist.get_rank()]) for each in calls]


@pytest.mark.parametrize(
    ("dynamic", "before"),
    [(None, []), (True, []), (True, [1]), (None, [1]), (None, [1, 3])],
    ids=["first", "first, dynamic", "dynamic", "constant", "varied"],
)
@pytest.mark.parametrize("differs", ["batch", "number"])
def test_ranks_are_given_other_batches_or_numbers(
    differs: str, dynamic: bool | None, before: list[int]
) -> None:
    """Where that is a symbol no guard of Dynamo's sees it."""
    equal = [[(n, float(n))] * 2 for n in before]
    unequal = [(2, 1.5), (4, 1.5)] if differs == "batch" else [(2, 1.5), (2, 2.5)]
    for *well, refused in run_on_ranks(_given, dynamic, [*equal, unequal], world_size=2):
        assert [name for name, _ in well] == ["returned"] * len(before)
        assert refused[0] == "RanksDisagree"


def _views() -> list[Attempt]:
    """The ranks' slices as views of the whole sequence: each at another place of its memory."""
    torch._dynamo.reset()
    function = compiled(attention)
    calls = []
    for length in (6, 8, 5):
        whole = rows(2 * length)
        mine = whole[:, dist.get_rank() * length :][:, :length]
        calls.append(attempt(lambda mine=mine: function(mine).shape))
    return calls


def test_slices_that_are_views_of_the_whole_sequence() -> None:
    for calls in run_on_ranks(_views, world_size=2):
        assert calls == [("returned", f"torch.Size([2, {length}, 2])") for length in (6, 8, 5)]


def _other_mark() -> list[Attempt]:
    model = compiled(lambda x, y: attention(x) * y.cos().mean())
    y = zeco_compile.mark_sequence(rows(6), None)
    first = attempt(lambda: model(rows(6), y).shape)
    return [first, attempt(lambda: model(rows(6), y.clone()).shape)]  # a copy is not marked


def test_mark_that_changes_between_calls() -> None:
    for first, second in run_on_ranks(_other_mark, world_size=2):
        assert first == ("returned", "torch.Size([2, 6, 2])")
        name, message = second
        assert name == "SequenceInputError"
        assert "is marked to run along the sequence in dimension 1" in message
        assert "compiled for an input that does so in dimension None" in message


class MaskInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(32, 32, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = x.chunk(3, -1)
        return ((q @ k.mT) * self.mask[:T, :T]) @ v


def _changing_mask() -> list[Attempt]:
    model = MaskInBuffer()
    function = compiled(model)
    x = rows(6)
    answers = [attempt(lambda: function(x).shape)]
    model.mask.copy_(torch.tril(torch.ones(32, 32)))  # written to, but the same
    answers.append(attempt(lambda: function(x).shape))
    model.mask.fill_(1)
    answers.append(attempt(lambda: function(x).shape))
    return answers


def test_mask_in_a_buffer_that_changes_between_calls() -> None:
    for first, same, other in run_on_ranks(_changing_mask, world_size=2):
        assert first == same == ("returned", "torch.Size([2, 6, 2])")
        name, message = other
        assert name == "MaskChanged"
        assert "mask" in message


def _with_nan(which: int, at: int, full: tuple[Tensor, ...]) -> Tensor:
    mine = [each.chunk(2, 1)[dist.get_rank()].clone() for each in full]
    return compiled(by_name)(*mine)


@pytest.mark.parametrize("which", range(4), ids="qkvg")
@pytest.mark.parametrize("at", [3, 8])
def test_nan_in_gives_nan_out_on_every_rank(which: int, at: int) -> None:
    torch.manual_seed(0)
    full = tuple(torch.randn(2, 12, 2, size, dtype=torch.float64) for size in (3, 3, 4, 3))
    full[3].neg_().abs_().neg_()
    full[which][0, at, 1, 2] = float("nan")
    o = torch.cat(run_on_ranks(_with_nan, which, at, full, world_size=2), 1)
    truth, _ = recurrent_gated_linear_attention(*full, scale=3**-0.5)
    assert truth.isnan().any()
    assert o[truth.isnan()].isnan().all()
    elsewhere = torch.ones_like(o, dtype=torch.bool)
    elsewhere[0, :, 1] = False
    assert not o[elsewhere].isnan().any(), "the other sequence and the other head have nothing to do with it"


# --------------------------------------------------------------------------------------------------------- models


def test_model_with_nothing_to_recognise_that_is_position_local() -> None:
    found = assert_equivalent(lambda: position_local, lambda: rows(6), world_size=2)
    assert found.regions == []


def test_model_with_nothing_to_recognise_that_mixes_positions() -> None:
    messages = assert_refused(lambda: mixes, lambda: rows(6), world_size=2, error=errors.UnsupportedOp)
    for message in messages:
        assert line_of("this line mixes") in message
        assert "sort" in message
        assert "torch.sort(x, 1)[0]" in message


def _refused_and_after(suppress_errors: bool) -> tuple[Attempt, list[str]]:
    reached: list[str] = []

    def step() -> None:
        x = rows(6).requires_grad_()
        y = function(x)
        reached.append("forward returned")
        y.sum().backward()
        reached.append("backward returned")

    function = compiled(mixes, fullgraph=not suppress_errors)
    with dynamo_config(suppress_errors=suppress_errors):
        return attempt(step), reached


@pytest.mark.parametrize("suppress_errors", [False, True])
def test_refused_model_computes_nothing_even_where_dynamo_is_to_suppress_errors(
    suppress_errors: bool,
) -> None:
    for (name, message), reached in run_on_ranks(_refused_and_after, suppress_errors, world_size=2):
        assert name == "UnsupportedOp"
        assert line_of("this line mixes") in message
        assert reached == []


def broken(x: Tensor, reached: list[str]) -> Tensor:
    y = attention(x)
    torch._dynamo.graph_break()  # this line breaks
    reached.append("the code behind the break")
    return attention(torch.cat((y, 2 * y, 3 * y), -1))


def _broken(graph_breaks: str) -> tuple[Attempt, list[str], Tensor | None]:
    reached: list[str] = []
    torch.manual_seed(0)
    x = rows(12)
    results: list[Tensor] = []
    function = compiled(broken, fullgraph=False, graph_breaks=graph_breaks)
    answer = attempt(lambda: results.append(function(x.chunk(2, 1)[dist.get_rank()].clone(), reached)))
    return answer, reached, results[0] if results else None


def test_graph_break_is_refused_with_the_line_and_nothing_behind_it_runs() -> None:
    for (name, message), reached, _ in run_on_ranks(_broken, "error", world_size=2):
        assert name == "GraphBreak"
        assert line_of("this line breaks") in message
        assert 'options={"graph_breaks": "allow"}' in message
        assert reached == []


def test_graph_break_that_is_allowed() -> None:
    answers = run_on_ranks(_broken, "allow", world_size=2)
    assert [reached for _, reached, _ in answers] == [["the code behind the break"]] * 2
    torch.manual_seed(0)
    y = attention(rows(12))
    expected = attention(torch.cat((y, 2 * y, 3 * y), -1))
    torch.testing.assert_close(torch.cat([each for _, _, each in answers], 1), expected)


def _recompiling(limit: int) -> list[Attempt]:
    def moody(x: Tensor, mood: str) -> Tensor:
        return attention(x) * len(mood)

    with dynamo_config(recompile_limit=limit):
        function = compiled(moody, fullgraph=False)
        return [attempt(lambda n=n: function(rows(6), "x" * n).shape) for n in range(1, limit + 3)]


def test_recompilation_limit_is_an_error_and_never_eager() -> None:
    for answers in run_on_ranks(_recompiling, 3, world_size=2):
        names = [name for name, _ in answers]
        assert names == ["returned"] * 2 + ["RecompilationLimit"] * 3
        assert "recompile_limit" in answers[-1][1]


# ---------------------------------------------------------------------------------------------------------- ranks


def another_attention(x: Tensor) -> Tensor:
    """`attention`, but with keys of its own."""
    k, q, v = x.chunk(3, -1)
    return torch.tril(q @ k.mT) @ v


def _different(kind: str) -> tuple[Attempt, float]:
    odd = dist.get_rank() % 2 == 1
    options: dict[str, Any] = {}
    model: Any = attention
    if kind == "regions":
        model = another_attention if odd else attention
    elif kind == "one has none":
        model = position_local if odd else attention
    elif kind == "options":
        options = {"schedule": "lasp2" if odd else "all_scan"}
    elif kind == "scale":
        scale = 2.0 if odd else 1.0

        def model(x: Tensor) -> Tensor:
            return zeco_compile.gated_linear_attention(*x[:, :, None].chunk(3, -1), scale=scale)

    elif kind == "local ops":
        model = torch.tanh if odd else torch.sigmoid
    start = time.monotonic()
    return attempt(lambda: compiled(model, **options)(rows(6))), time.monotonic() - start


@pytest.mark.parametrize("kind", ["regions", "one has none", "options", "scale", "local ops"])
def test_ranks_with_different_models(kind: str) -> None:
    answers = run_on_ranks(_different, kind, world_size=3)
    for (name, message), seconds in answers:
        assert name == "RanksDisagree"
        assert "rank 1: " in message
        assert "ranks 0, 2: " in message
        assert seconds < SECONDS
    assert len({message for (_, message), _ in answers}) == 1


def _training_step(function: Callable[..., Any]) -> None:
    x = torch.randn(2, 16, 4, 8, dtype=torch.float64)
    q, k, v = ((x * n).requires_grad_() for n in range(1, 4))
    function(q, k, v, -x.abs()).sum().backward()


def _losing_a_rank(lost: int, how: str, nth: int, silence: float) -> tuple[Attempt, float]:
    """One good step, then rank `lost` ends (or is silent) at its `nth` transfer of the next one."""
    from zeco_compile.lowering import communicator

    function = compiled(by_name)
    _training_step(function)
    post, count = communicator.Link.post, 0

    def fatal(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(silence)
        return post(self, *args, **kwargs)

    if dist.get_rank() == lost:
        communicator.Link.post = fatal  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        return attempt(lambda: _training_step(function)), time.monotonic() - start
    finally:
        communicator.Link.post = post  # type: ignore[method-assign]


def _lost(outcomes: list[Outcome], lost: int) -> list[tuple[Attempt, float]]:
    others = [outcome for outcome in outcomes if outcome.rank != lost]
    assert [outcome.status for outcome in others] == ["ok"] * len(others)
    return [outcome.value for outcome in others]


TIMEOUT = 8.0


@pytest.mark.parametrize(("world_size", "lost", "nth"), [(3, 1, 1), (2, 0, 2)], ids=["forward", "backward"])
def test_rank_that_is_killed_during_the_scan(world_size: int, lost: int, nth: int) -> None:
    outcomes = run_on_ranks(
        _losing_a_rank, lost, "killed", nth, 0.0, world_size=world_size, group_timeout=TIMEOUT, check=False
    )
    assert outcomes[lost].status == "died"
    for (name, message), seconds in _lost(outcomes, lost):
        assert name == "NeighbourLost", message
        assert f"group rank {lost} (global rank {lost})" in message
        assert seconds < 2 * TIMEOUT


def test_rank_that_is_silent_during_the_scan() -> None:
    outcomes = run_on_ranks(
        _losing_a_rank, 0, "silent", 1, 3 * TIMEOUT, world_size=2, group_timeout=TIMEOUT, check=False
    )
    ((name, message), seconds), *_ = _lost(outcomes, 0)
    assert name == "NeighbourLost", message
    assert "receiving from group rank 0 (global rank 0)" in message
    assert TIMEOUT * 0.9 < seconds < 2 * TIMEOUT


def _killed_at_any_time(lost: int) -> tuple[Attempt, float]:
    function = compiled(by_name)
    _training_step(function)
    if dist.get_rank() == lost:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def train() -> None:
        while True:
            last[0] = time.monotonic()
            _training_step(function)

    last = [time.monotonic()]
    return attempt(train), time.monotonic() - last[0]


def test_rank_that_is_killed_at_any_time_of_training() -> None:
    outcomes = run_on_ranks(_killed_at_any_time, 1, world_size=3, group_timeout=TIMEOUT, check=False)
    assert outcomes[1].status == "died"
    for (name, message), seconds in _lost(outcomes, 1):
        assert name in ("NeighbourLost", "RankMissing"), message
        assert seconds < 2 * TIMEOUT


def _float_attribute(calls: list[list[float]]) -> list[Attempt]:
    torch._dynamo.reset()

    class Scaled(nn.Module):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return attention(x * self.factor)

    model = Scaled()
    function = compiled(model)
    outcomes = []
    for each in calls:
        model.factor = each[dist.get_rank()]
        outcomes.append(attempt(lambda: function(rows(6)).shape))
    return outcomes


def test_a_number_of_the_model_that_differs_between_ranks() -> None:
    """From the second value on Dynamo has a symbol for it, which no guard of its sees."""
    for *well, refused in run_on_ranks(
        _float_attribute, [[1.5, 1.5], [2.5, 2.5], [3.5, 3.5], [1.0, 4.0]], world_size=2
    ):
        assert [name for name, _ in well] == ["returned"] * 3
        assert refused[0] == "RanksDisagree"


def test_an_empty_batch() -> None:
    def empty() -> Attempt:
        function = compiled(attention)
        return attempt(lambda: function(rows(6)[:0]))

    for name, message in run_on_ranks(empty, world_size=2):
        assert name == errors.SequenceInputError.__name__
        assert "empty" in message


def _one_is_refused() -> tuple[Attempt, float]:
    from zeco_compile.lowering import agreement

    group = dist.new_group()  # which is not to be used again
    patience = agreement._LOOK_SECONDS, agreement._STANDS_SECONDS
    agreement._LOOK_SECONDS, agreement._STANDS_SECONDS = 0.2, 0.6
    model = attention if dist.get_rank() == 0 else lambda x: x.sort(1).values
    start = time.monotonic()
    try:
        outcome = attempt(lambda: compiled(model, group=group)(rows(6)))
    finally:
        agreement._LOOK_SECONDS, agreement._STANDS_SECONDS = patience
    return outcome, time.monotonic() - start


def test_what_one_rank_is_refused_reaches_the_others() -> None:
    (waited, seconds), (refused, _) = run_on_ranks(_one_is_refused, world_size=2)
    assert refused[0] == errors.UnsupportedOp.__name__
    assert waited[0] == "RankMissing"
    assert "rank 1 has raised an error of its own: UnsupportedOp" in waited[1]
    assert seconds < SECONDS
