"""Started scans are found by storage, once, and let go when nobody waits."""

from __future__ import annotations

import gc

import pytest
import torch

from zeco_compile.lowering import in_flight
from zeco_compile.lowering.errors import TransferNotFound


def _start(value: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state, log_decay = torch.full((1, 2, 3, 4), value), torch.zeros(1, 2, 3)
    boundary = torch.full_like(state, value)
    return torch.ops.zeco.scan_start(state, log_decay, boundary, False, "all_scan", 0, ""), state, log_decay


def test_found_by_storage():
    token, state, log_decay = _start(3.0)
    same_storage = token.view(1, 1).detach()
    out = torch.ops.zeco.scan_wait(same_storage, state, log_decay, "")
    assert (out == 3.0).all()
    assert in_flight.pending() == 0


def test_two_waits_are_refused():
    token, state, log_decay = _start()
    torch.ops.zeco.scan_wait(token, state, log_decay, "")
    with pytest.raises(TransferNotFound, match="waited for once"):
        torch.ops.zeco.scan_wait(token, state, log_decay, "")


def test_a_copy_is_refused():
    token, state, log_decay = _start()
    with pytest.raises(TransferNotFound):
        torch.ops.zeco.scan_wait(token.clone(), state, log_decay, "")


def test_an_exception_between_start_and_wait_leaves_nothing():
    def step():
        token, *_ = _start()
        assert in_flight.pending() == 1
        raise KeyError(token.shape)

    with pytest.raises(KeyError):
        step()
    gc.collect()
    assert in_flight.pending() == 0


def test_many_in_flight():
    tokens = [_start(float(value)) for value in range(20)]
    for value in (7, 0, 19, 3):
        out = torch.ops.zeco.scan_wait(*tokens[value], "")
        assert (out == value).all()
    del tokens
    gc.collect()
    assert in_flight.pending() == 0
