"""Pools of real gloo processes, shared by the test modules of this folder that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from zeco_compile.testing.pool import Pool, raise_failures


class Ranks:
    """``world_size`` gloo processes, kept alive from one call to the next."""

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        self._pool = Pool(world_size, timeout_seconds)

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
        outcomes = self._pool.run(_with_rank, (function, ranks, *args), seconds)
        asked = [each for each in outcomes if ranks is None or each.rank in ranks]
        raise_failures([each for each in asked if not (errors and each.status == "raised")])
        return [each.error if each.status == "raised" else each.value for each in outcomes]

    def kill(self, rank: int) -> None:
        self._pool.kill(rank)

    def close(self) -> None:
        self._pool.close()


def _with_rank(function: Callable[..., Any], ranks: list[int] | None, *args: Any) -> Any:
    rank = dist.get_rank()
    return function(rank, *args) if ranks is None or rank in ranks else None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(P)``: a pool of P processes, kept alive until the module's tests are through."""
    made: dict[int, Ranks] = {}

    def pool(world_size: int) -> Ranks:
        if world_size not in made:
            made[world_size] = Ranks(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Ranks]]:
    """``fresh_ranks(P, timeout_seconds)``: a pool that this test may break."""
    made: list[Ranks] = []

    def pool(world_size: int, timeout_seconds: float = 60.0) -> Ranks:
        made.append(Ranks(world_size, timeout_seconds))
        return made[-1]

    yield pool
    for each in made:
        each.close()
