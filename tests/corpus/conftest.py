"""Prints what became of the corpus: recall, and how many rewrites were wrong (none may be)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

RESULTS: pytest.StashKey[list[tuple[str, bool, str]]] = pytest.StashKey()
"""(name, whether regions are to be recognised, what became of it) of every entry that ran."""


@pytest.fixture
def corpus_results(request: pytest.FixtureRequest) -> list[tuple[str, bool, str]]:
    return request.config.stash.setdefault(RESULTS, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash.get(RESULTS, [])
    if not results:
        return
    attention = Counter(outcome for _, wanted, outcome in results if wanted)
    others = Counter(outcome for _, wanted, outcome in results if not wanted)
    wrong = [name for name, _, outcome in results if outcome == "wrong"]
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
