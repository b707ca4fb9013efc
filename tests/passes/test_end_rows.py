"""Which rows slices take, of a short sequence and of a longer one."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zeco_compile.passes.end_rows import as_many_as_there_are, ends, is_first, rows_taken


def sliced(length, take):
    """The slice, or the like, that `take` makes of a value with so many rows."""
    graph = make_fx(take)(torch.zeros(2, length, 3)).graph
    return next(n for n in graph.nodes if n.op == "call_function")


def test_rows_that_are_taken():
    assert ends(sliced(6, lambda x: torch.ops.aten.slice.Tensor(x, 1, -3))) == (3, 3, 0)
    assert ends(sliced(6, lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, -2))) == (3, 1, 2)
    assert ends(sliced(6, lambda x: torch.ops.aten.slice.Tensor(x, 1, -8))) == (6, 0, 0)
    assert ends(sliced(6, lambda x: torch.ops.aten.select.int(x, 1, -1))) == (1, 5, 0)
    assert ends(sliced(6, lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 6, 2))) is None
    assert (
        rows_taken(sliced(6, lambda x: torch.ops.aten.slice.Tensor(x, 1, -3))) == "3 of 6 rows, from row 3 on"
    )


def test_the_end_they_are_counted_from():
    def pair(take):
        return sliced(6, take), sliced(12, take)

    assert is_first(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, -3))) is False
    assert is_first(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3))) is True
    assert is_first(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, -3))) is None
    assert (
        is_first(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, x.shape[1] // 2, x.shape[1] // 2 + 1)))
        is None
    )
    assert is_first(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, -8))) is None


def test_more_rows_than_a_short_sequence_has():
    def pair(take):
        return sliced(6, take), sliced(12, take)

    assert as_many_as_there_are(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, -8))) == 8
    assert as_many_as_there_are(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 6))) == 6
    assert as_many_as_there_are(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, -3))) is None
    assert as_many_as_there_are(*pair(lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, x.shape[1]))) is None
