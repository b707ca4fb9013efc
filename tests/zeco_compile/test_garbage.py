"""While a graph is compiled Python looks for garbage seldom, and afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from zeco_compile.garbage import seldom_collected


@pytest.fixture
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_thresholds_are_put_back(usual: tuple[int, int, int]) -> None:
    with seldom_collected():
        assert gc.get_threshold() == (50_000, 11, 12)
        with seldom_collected():  # the second look compiles inside of a compilation
            assert gc.get_threshold() == (50_000, 11, 12)
    assert gc.get_threshold() == usual


def test_thresholds_are_put_back_after_an_error(usual: tuple[int, int, int]) -> None:
    with pytest.raises(KeyError), seldom_collected():
        raise KeyError
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("own", [0, 200_000], ids=["never", "seldom already"])
def test_what_the_user_has_set_is_kept(usual: tuple[int, int, int], own: int) -> None:
    gc.set_threshold(own, 5, 5)
    with seldom_collected():
        assert gc.get_threshold() == (own, 5, 5)


def test_a_compilation_leaves_them_as_they_were(usual: tuple[int, int, int]) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="zeco", options={"codegen": "aot_eager"})
    assert torch.equal(compiled(torch.ones(1, 3, 2)), torch.full((1, 3, 2), 2.0))
    assert gc.get_threshold() == usual
    torch._dynamo.reset()
