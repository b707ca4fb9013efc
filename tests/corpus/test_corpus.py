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

BY_HAND = frozenset(
    {
        "chunk_loop_many", "chunk_loop_simple_gla", "chunk_view_exclusive_gate", "chunk_view_ssd_minimal",
        "loop_baddbmm_merged", "loop_diagonal_read_by_parameter", "loop_final_state", "loop_first_step_inside",
        "loop_gla_list_stack", "loop_hgrn_elementwise", "loop_into_buffer_like_queries", "loop_lru", "loop_mingru",
        "loop_no_decay_bmm", "loop_one_token_loss", "loop_padding_kept", "loop_read_before_learned_state",
        "loop_reset_at_document", "loop_retention_python_gamma", "loop_rwkv4_exponents", "loop_s4d_complex",
        "loop_slstm", "loop_static_sqrt_length", "loss_rolled_labels", "loss_span", "loss_weighted_smoothed",
        "model_centred", "model_first_token", "model_largest_position", "model_last_token", "model_moe_sorted",
        "model_pooled_mean", "model_position_table_slice", "model_positions_from_mask", "model_token_shift_cat",
        "model_token_shift_written", "model_transformer_encoder_mask", "model_windows_of_rows",
        "near_band_from_products", "near_band_in_buffer", "near_band_wider_than_slice", "near_complex_matrix",
        "near_complex_modulus_fed_back", "near_complex_neighbour_channel", "near_complex_real_part_inside",
        "near_complex_reset_far", "near_gate_on_values", "near_gate_one_step_late_loop",
        "near_gate_one_step_late_quadratic", "near_gate_sees_future", "near_mask_keeps_older_state",
        "near_mask_of_next_token", "near_mask_of_state", "near_mask_stops_gradient", "near_maximum_of_state",
        "near_maximum_reset", "near_row_of_window_by_index", "near_row_view_written",
        "near_scan_complex_not_associative", "near_scan_detached", "near_scan_dropout", "near_scan_gate_from_state",
        "near_scan_mixed_features", "near_scan_not_associative", "near_scan_tanh", "near_scan_without_first",
        "near_state_reset_every_few", "near_state_reset_far", "near_table_split", "near_table_strided",
        "quadratic_causal_mean", "quadratic_decay_matrix_buffer", "quadratic_exclusive_gate", "quadratic_gla_factored",
        "quadratic_gla_unsqueezed_sum", "quadratic_lightning_slopes", "quadratic_multi_query",
        "quadratic_no_decay_mask_buffer", "quadratic_no_decay_triu_masked", "quadratic_padding_mask",
        "quadratic_retention_learned_decay", "quadratic_retention_python_gamma", "quadratic_retention_torchscale",
        "quadratic_simple_gla_bht", "quadratic_strict_mask", "quadratic_with_denominator",
    }
)  # fmt: skip
"""Entries that others stand for, so that the suite takes no longer than people wait: with ZECO_CORPUS=all they run."""


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
    everything = os.environ.get("ZECO_CORPUS") == "all"
    for name in ENTRIES:
        if name in BY_HAND and not everything:
            continue
        module = load(name)
        more = getattr(module, "MORE_LOCAL_LENGTHS", ()) if everything else ()
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
