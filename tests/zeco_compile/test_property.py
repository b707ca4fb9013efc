"""Random models, compiled and sharded over real processes, equal themselves unsharded in eager.

Outputs and every gradient, per rank; and the report says that the attention of each layer was recognised once,
as the family that it is.

`ZECO_PROPERTY_EXAMPLES=1000` draws that many models, at random, instead of CI's few, which are always the same.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, settings

from zeco_compile.passes.errors import LengthInValue
from zeco_compile.testing import Equivalence, assert_equivalent

STRATEGIES = str(Path(__file__).with_name("strategies.py"))


def load_strategies(path: str = STRATEGIES) -> ModuleType:
    """The module of models beside this file, by its path: the ranks have no other way to it."""
    if "zeco_strategies" not in sys.modules:
        spec = importlib.util.spec_from_file_location("zeco_strategies", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["zeco_strategies"] = module
        spec.loader.exec_module(module)
    return sys.modules["zeco_strategies"]


strategies = load_strategies()

_MANY = int(os.environ.get("ZECO_PROPERTY_EXAMPLES", "0"))


def profile(examples: int) -> settings:
    """Few examples, the same ones every time, in CI; as many as asked for, new ones every time, else."""
    return settings(
        max_examples=_MANY or examples,
        deadline=None,
        derandomize=not _MANY,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink] if _MANY else [Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=bool(_MANY),
    )


def equivalent(program: Any, codegen: str) -> Equivalence:
    plain, path, load = program.plain(), STRATEGIES, load_strategies
    if currently_in_test_context():
        note(f"the program: {plain}")
    return assert_equivalent(
        lambda: load(path).build(plain),
        lambda: load(path).inputs(plain),
        world_size=program.world_size,
        dtype=program.torch_dtype,
        # In float32 a cumulative sum of strong gates is off by more than the operator is: the truth is float64.
        reference_dtype=torch.float64,
        seed=program.seed,
        codegen=codegen,
    )


def assert_recognised(program: Any, found: Equivalence) -> None:
    """Every rank reports one region for each layer, as the family and in the way that the program has.

    But where the whole sequence is one token no code mixes positions, and there is nothing to recognise.
    """
    if program.length == 1:
        return
    how = strategies.BY_NAME[program.spelling].how
    for report in found.reports:
        regions = [(region["family"], region["how"]) for region in report["regions"]]
        assert regions == [(program.family, how)] * program.layers, f"rank {report['rank']}: {regions}"
        files = {region["location"]["file"] for region in report["regions"]}
        assert files == {STRATEGIES}, files


@pytest.mark.parametrize("spelling", strategies.SPELLINGS, ids=lambda spelling: spelling.name)
def test_random_models_equal_themselves_unsharded(spelling: Any) -> None:
    @profile(1)
    @given(program=strategies.programs((spelling,)))
    def holds(program: Any) -> None:
        assert_recognised(program, equivalent(program, "aot_eager"))

    holds()


ONE_OF_A_KIND = ("by name", "matmul, tril", "einsum, masked exponent", "loop, in place")


@pytest.mark.parametrize("spelling", map(strategies.BY_NAME.__getitem__, ONE_OF_A_KIND), ids=lambda s: s.name)
def test_one_sequence_with_one_token_per_rank(spelling: Any) -> None:
    """Both axes have size one, and folding and unfolding them may not exchange them. A loop's body once is no loop."""
    program = strategies.Program(
        world_size=2,
        batch=1,
        local_length=1,
        heads=3,
        key=2,
        value=5,
        family=spelling.families[0],
        spelling=spelling.name,
        gates=("mild",),
        dtype="float64",
        layers=1,
        convolution=3,
        token_shift=True,
        rotary=True,
        head="rows",
        state=spelling.how == "by name",
        seed=0,
    )
    if spelling.name.startswith("loop"):
        with pytest.raises(LengthInValue, match="at least two tokens"):
            equivalent(program, "aot_eager")
    else:
        assert_recognised(program, equivalent(program, "aot_eager"))


@profile(2)
@given(program=strategies.programs())
def test_random_models_of_any_spelling_equal_themselves_unsharded(program: Any) -> None:
    assert_recognised(program, equivalent(program, "aot_eager"))


@profile(1)
@given(program=strategies.programs())
def test_random_models_equal_themselves_unsharded_through_inductor(program: Any) -> None:
    assert_recognised(program, equivalent(program, "inductor"))
