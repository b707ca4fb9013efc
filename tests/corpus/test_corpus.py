"""Every model of this folder: recognised as what its label says and equal to itself unsharded, or refused.

A module of the corpus has, besides a model as its author would have written it:

    make_model()                        the model
    make_inputs(batch, length, dtype)   its inputs for the whole sequence
    LOCAL_LENGTHS                       tokens per rank, one run for each; those of MORE_LOCAL_LENGTHS only with
                                        ZECO_CORPUS=all in the environment. WORLD_SIZE if it is not 2
    EXPECTED                            {"families": [...]}: regions that must be recognised, in order, or
                                        {"refused": regex}: it must be an error that says so on every rank

With "or_refused" the first may still be refused, with "or_equal" the second may turn out equal: both are
right, and the label says which is the aim. Nothing allows a result that differs from the unsharded model's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.passes.errors import InternalError
from zeco_compile.testing import (
    Equivalence,
    HarnessError,
    NotEquivalent,
    NotRefused,
    assert_equivalent,
    assert_refused,
)

FOLDER = Path(__file__).parent
ENTRIES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("test_corpus", "__init__"))
BATCH = 2


def load(name: str) -> ModuleType:
    """The module of one entry, under a name of its own."""
    qualified = f"zeco_corpus_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


def runs() -> Iterator[tuple[str, int]]:
    for name in ENTRIES:
        module = load(name)
        more = getattr(module, "MORE_LOCAL_LENGTHS", ()) if os.environ.get("ZECO_CORPUS") == "all" else ()
        for length in (*module.LOCAL_LENGTHS, *more):
            yield name, length


def arguments(name: str, local_length: int, world_size: int) -> dict[str, Any]:
    """What the harness needs; the ranks load the entry from its file, so that errors name its lines."""
    path, folder = str(FOLDER / "test_corpus.py"), str(FOLDER)

    def entry() -> ModuleType:
        import importlib.util
        import sys

        if "zeco_corpus" not in sys.modules:
            spec = importlib.util.spec_from_file_location("zeco_corpus", path)
            sys.modules["zeco_corpus"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["zeco_corpus"])
        assert str(sys.modules["zeco_corpus"].FOLDER) == folder
        return sys.modules["zeco_corpus"].load(name)

    def make_model() -> Any:
        return entry().make_model()

    def make_inputs() -> Any:
        return entry().make_inputs(BATCH, local_length * world_size, torch.float64)

    return {"make_model": make_model, "make_inputs": make_inputs, "world_size": world_size}


@pytest.mark.parametrize(("name", "local_length"), list(runs()))
def test_corpus(name: str, local_length: int, record_property: Callable[[str, Any], None]) -> None:
    module = load(name)
    expected = module.EXPECTED
    case = arguments(name, local_length, getattr(module, "WORLD_SIZE", 2))
    wants_regions = bool(expected.get("families"))
    outcome = "failed"
    try:
        outcome = recognised(case, expected) if "families" in expected else refused(case, expected)
    except NotEquivalent:
        outcome = "wrong"
        raise
    finally:
        record_property("corpus", (f"{name}, {local_length} tokens a rank", wants_regions, outcome))


def recognised(case: dict[str, Any], expected: dict[str, Any]) -> str:
    try:
        found = assert_equivalent(**case)
    except (NotEquivalent, HarnessError, InternalError):
        raise
    except ZecoError:
        if not expected.get("or_refused"):
            raise
        return "refused"
    families = [region["family"] for region in found.regions]
    assert families == expected["families"], f"recognised {families}"
    assert_reported(found)
    return "recognised" if families else "equal"


def refused(case: dict[str, Any], expected: dict[str, Any]) -> str:
    if expected.get("or_equal"):
        try:
            assert_equivalent(**case)
        except (NotEquivalent, HarnessError, InternalError):
            raise
        except ZecoError as error:
            if re.search(expected["refused"], str(error), re.DOTALL) is None:
                raise
            return "refused"
        return "equal"
    try:
        assert_refused(**case, match=f"(?s){expected['refused']}")
    except NotRefused:
        assert_equivalent(**case)  # wrong numbers are a worse failure than a missing refusal
        raise
    return "refused"


def assert_reported(found: Equivalence) -> None:
    """Every region is reported with its source line and, where it was found by meaning, its check."""
    for region in found.regions:
        assert region["location"]["line"] > 0
        if region["how"] == "by meaning":
            assert region["check_error"] <= 1e-9
