"""Real gloo processes for the test modules that ask for them, and what became of the corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Where there is no GPU, Triton's kernels run in its interpreter: in this process, and in those that it starts. Triton
# reads this when it is imported, which nothing above does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from zeco_compile.garbage import collect_seldom
from zeco_compile.testing import run_on_ranks
from zeco_compile.testing.pool import Pool, raise_failures
from zeco_compile.testing.worker import Outcome


class Ranks:
    """``world_size`` gloo processes that all tests share, kept alive from one call to the next."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: list[int] | None = None,
        errors: bool = False,
        seconds: float = 240.0,
    ) -> list[Any]:
        """``function(rank, *args)`` on every rank (or on ``ranks``, with None for the others), within ``seconds``.

        What a rank raised is its result with ``errors``, and is raised here otherwise.
        """
        outcomes = self._outcomes(seconds, function, ranks, *args)
        asked = [each for each in outcomes if ranks is None or each.rank in ranks]
        raise_failures([each for each in asked if not (errors and each.status == "raised")])
        return [each.error if each.status == "raised" else each.value for each in outcomes]

    def _outcomes(self, seconds: float, *args: Any) -> list[Outcome]:
        return run_on_ranks(_with_rank, *args, world_size=self.world_size, timeout=seconds, check=False)


class FreshRanks(Ranks):
    """Processes for one test, which may break them."""

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        super().__init__(world_size)
        self._pool = Pool(world_size, timeout_seconds)

    def _outcomes(self, seconds: float, *args: Any) -> list[Outcome]:
        return self._pool.run(_with_rank, args, seconds)

    def kill(self, rank: int) -> None:
        self._pool.kill(rank)

    def close(self) -> None:
        self._pool.close()


def _with_rank(function: Callable[..., Any], ranks: list[int] | None, *args: Any) -> Any:
    rank = dist.get_rank()
    return function(rank, *args) if ranks is None or rank in ranks else None


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], Ranks]:
    """``ranks(P)``: P processes, the same ones for every test."""
    return Ranks


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., FreshRanks]]:
    """``fresh_ranks(P, timeout_seconds)``: processes that this test may break."""
    made: list[FreshRanks] = []

    def pool(world_size: int, timeout_seconds: float = 60.0) -> FreshRanks:
        made.append(FreshRanks(world_size, timeout_seconds))
        return made[-1]

    yield pool
    for each in made:
        each.close()


# What takes longest comes first, a file at a time to each of two processes: at the end none waits for the other.
LONGEST = (
    *("test_corpus", "test_property", "test_substitutes", "test_cases", "test_codegen", "test_exchange"),
    *(
        "test_losses",
        "test_gathered_keys",
        "test_rows_and_columns_constant_length",
        "test_example",
        "test_checkpoints",
    ),
    *("test_transformers", "test_attention", "test_loops", "test_bad_input"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    collect_seldom()  # as in the processes of the ranks
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


CORPUS: list[tuple[str, bool, str]] = []
"""(name, whether regions are to be recognised, what became of it) of every entry of the corpus that ran."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Entries may have run in another process (pytest-xdist): what they record comes with their reports."""
    if report.when == "call":
        CORPUS.extend(tuple(value) for name, value in report.user_properties if name == "corpus")  # type: ignore[arg-type, misc]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Recall of the corpus, and how many rewrites were wrong (none may be)."""
    if not CORPUS:
        return
    attention = Counter(outcome for _, wanted, outcome in CORPUS if wanted)
    others = Counter(outcome for _, wanted, outcome in CORPUS if not wanted)
    wrong = [name for name, _, outcome in CORPUS if outcome == "wrong"]
    write = terminalreporter.write_line
    terminalreporter.section("corpus of models")
    write(
        f"recall: {attention['recognised']} of {attention.total()} models with linear attention"
        f" recognised ({_counts(attention)})"
    )
    write(f"others: {others.total()} ({_counts(others)})")
    write(f"false rewrites: {len(wrong)}" + (f": {', '.join(wrong)}" if wrong else ""))


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counter.items()))
