"""Checks of values while a program runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeco_compile.lowering import checks
from zeco_compile.lowering.errors import DecayNotPositive


def test_logarithm_and_its_gradient() -> None:
    decay = (torch.rand(3, 4, dtype=torch.float64) + 0.1).requires_grad_()
    torch.testing.assert_close(checks.log_decay(decay, "here", ""), decay.log())
    torch.autograd.gradcheck(lambda a: checks.log_decay(a, "here", ""), (decay,))


def test_nan_stays_nan() -> None:
    assert checks.log_decay(torch.tensor([0.5, float("nan")]), "here", "")[1].isnan()


@pytest.mark.parametrize("value", [0.0, -0.5])
def test_a_decay_without_a_logarithm(value: float) -> None:
    with pytest.raises(DecayNotPositive, match=r"where: model.py:7"):
        checks.log_decay(torch.tensor([0.5, value]), "model.py:7", "")


def test_what_the_device_says_fits_into_an_assertion() -> None:
    assert checks.short_message("model.py:7").endswith("at model.py:7")
    long = checks.short_message("/folder" * 60 + "/model.py:7")
    assert len(long) < 255
    assert long.endswith("/model.py:7")


def test_opcheck(ranks: Any) -> None:
    torch.library.opcheck(checks.log_decay, (torch.rand(2, 3) + 0.1, "here", ""))


def test_error_travels_between_processes() -> None:
    import pickle

    copy = pickle.loads(pickle.dumps(DecayNotPositive("model.py:7")))
    assert copy.where == "model.py:7"
    assert "model.py:7" in str(copy)
