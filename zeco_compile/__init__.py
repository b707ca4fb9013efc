"""Sequence parallelism for gated linear attention, done by a compiler: ``torch.compile(..., backend="zeco")``.

Everything public is here. Names are imported when they are first used, so that importing the package is cheap and
imports no PyTorch (``TORCH_LOGS="+zeco_compile"`` imports it while PyTorch itself is still being imported).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeco_compile import errors, testing
    from zeco_compile.attention import gated_linear_attention
    from zeco_compile.errors import ZecoError
    from zeco_compile.explanation import explain
    from zeco_compile.marks import mark_sequence
    from zeco_compile.report_log import last_report, reports
    from zeco_compile.sequence import gather_sequence, shard_sequence

__version__ = "0.1.0"

# No function has the name of a module of this package: importing a module binds its name here, over the function.
_WHERE = {
    "ZecoError": "zeco_compile.errors",
    "errors": "zeco_compile.errors",
    "explain": "zeco_compile.explanation",
    "gated_linear_attention": "zeco_compile.attention",
    "gather_sequence": "zeco_compile.sequence",
    "last_report": "zeco_compile.report_log",
    "mark_sequence": "zeco_compile.marks",
    "reports": "zeco_compile.report_log",
    "shard_sequence": "zeco_compile.sequence",
    "testing": "zeco_compile.testing",
}

__all__ = [
    "ZecoError",
    "errors",
    "explain",
    "gated_linear_attention",
    "gather_sequence",
    "last_report",
    "mark_sequence",
    "reports",
    "shard_sequence",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    value = (
        module
        if _WHERE[name].rpartition(".")[2] == name and not hasattr(module, name)
        else getattr(module, name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
