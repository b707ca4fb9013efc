"""Private PyTorch API that the face of the package leans on: one named function each, one test each.

The tests are in ``tests/zeco_compile/test_torch_private.py``. When a PyTorch release moves one of these, that
test says which, and this file is the only one of this folder to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch._logging


def trace_artifact(name: str, encoding: Literal["string", "json"], payload: Callable[[], str]) -> None:
    """Adds a text to the structured trace that ``TORCH_TRACE`` switches on and that tlparse shows.

    ``payload`` is called only if a trace is being written. tlparse shows "json" indented, "string" as it is.
    """
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        # Called from outside a compilation (explain), the trace has no frame to hang the artifact on; without
        # this it would record a stack trace with every artifact to complain about that.
        expect_trace_id=False,
    )
