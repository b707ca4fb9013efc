"""Pools of real gloo processes, shared by the test modules of this folder that ask for them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def _rank_pool_class() -> Any:
    path = Path(__file__).with_name("rank_pool.py")
    spec = importlib.util.spec_from_file_location("zeco_rank_pool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("zeco_rank_pool", module)
    spec.loader.exec_module(module)
    return module.RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    """``ranks(P)``: a pool of P processes, kept alive until the module's tests are through."""
    rank_pool = _rank_pool_class()
    made: dict[int, Any] = {}

    def pool(world_size: int) -> Any:
        if world_size not in made:
            made[world_size] = rank_pool(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Any]]:
    """``fresh_ranks(P, timeout_seconds)``: a pool that this test may break."""
    rank_pool = _rank_pool_class()
    made: list[Any] = []

    def pool(world_size: int, timeout_seconds: float = 60.0) -> Any:
        made.append(rank_pool(world_size, timeout_seconds))
        return made[-1]

    yield pool
    for each in made:
        each.close()
