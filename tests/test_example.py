"""The example: its model in float64 on real ranks, and the demo as a user starts it, with fewer steps."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.testing import assert_equivalent

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "train_gla.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # the ranks look for modules where this process does
    return importlib.import_module(EXAMPLE.stem)


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_equals_itself_unsharded(example: ModuleType, world_size: int) -> None:
    def model() -> nn.Module:
        return example.ByteLM(example.Config(layers=2, width=24, heads=2, key=5, value=7))

    def inputs() -> tuple[Tensor]:
        return (torch.randint(256, (3, 36)),)

    found = assert_equivalent(model, inputs, world_size=world_size)
    assert found.output_dims == (None,), "the loss is that of the whole sequence, on every rank"
    assert [(region["family"], region["how"]) for region in found.regions] == [
        ("per channel", "by meaning")
    ] * 2
    files = {region["location"]["file"] for region in found.regions}
    assert files == {str(EXAMPLE)}
    if world_size > 1:
        assert len(found.decisions("halo exchange")) == 2


def test_demo_ends_with_the_table(tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    arguments = ["--steps=3", "--batch=2", "--length=64", "--codegen=aot_eager", f"--out={out}"]
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for row in ("largest loss difference", "recognised as linear attention", "per channel", "sent per rank"):
        assert row in ran.stdout
    assert {path.name for path in out.iterdir()} == {"rank0", "rank1"}
    assert list(out.glob("rank0/graph*/report.md"))
