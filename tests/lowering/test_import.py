"""Importing the lowering registers ops and does nothing else."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading
import torch
threads = threading.active_count()
import zeco_compile.lowering
from zeco_compile.lowering import communicator, in_flight
assert threading.active_count() == threads
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert not communicator._registry._entries
assert in_flight.pending() == 0
print(*sorted(name for name in (
    "rank_state", "scan_start", "scan_wait", "diagonal", "combine", "rank_dstate", "diagonal_backward",
    "combine_backward", "final_state", "gated_linear_attention",
) if not hasattr(torch.ops.zeco, name)))
"""


def test_import():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", "ops that are missing"
