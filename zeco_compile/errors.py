"""All errors of zeco_compile, in one place to import from.

Every one derives from `ZecoError` and says what was found and what to do. Those raised while a model is
compiled derive from `CompileError` as well; an error of the run-time (a lost neighbour, shards of unequal
length) raised during compilation is made one on the way (`zeco_compile.passes.errors.refusing`), and still
caught under its own name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from zeco_compile.kernels.errors import InvalidShapes, ZecoError
from zeco_compile.lowering.agreement import RankMissing
from zeco_compile.lowering.errors import (
    CommunicatorUnavailable,
    DecayNotPositive,
    GroupNotFound,
    InvalidLinkCosts,
    InvalidSchedule,
    NeighbourLost,
    RanksDisagree,
    SecondDerivative,
    TransferNotFound,
    UnequalShards,
)
from zeco_compile.lowering.exchange_parts import IndivisibleSequence, InvalidExchange
from zeco_compile.lowering.groups import GroupChanged, InvalidGroup
from zeco_compile.passes.errors import (
    AmbiguousSequence,
    CompileError,
    GraphBreak,
    InternalError,
    LengthInValue,
    MaskChanged,
    RecognitionRefused,
    RecompilationLimit,
    SequenceInputError,
    UnsupportedArgument,
    UnsupportedFunction,
    UnsupportedOp,
)
from zeco_compile.passes.overlap import OrderLost

__all__ = [
    "AmbiguousSequence",
    "CommunicatorUnavailable",
    "CompileError",
    "DebugFolderUnusable",
    "DecayNotPositive",
    "GraphBreak",
    "GroupChanged",
    "GroupNotFound",
    "IndivisibleSequence",
    "InternalError",
    "InvalidExchange",
    "InvalidGroup",
    "InvalidLinkCosts",
    "InvalidOption",
    "InvalidSchedule",
    "InvalidShapes",
    "InvalidTrace",
    "LengthInValue",
    "MaskChanged",
    "NeighbourLost",
    "OrderLost",
    "RankMissing",
    "RanksDisagree",
    "RecognitionRefused",
    "RecompilationLimit",
    "SecondDerivative",
    "SequenceInputError",
    "TransferNotFound",
    "UnequalShards",
    "UnsupportedArgument",
    "UnsupportedFunction",
    "UnsupportedOp",
    "ZecoError",
]


class InvalidOption(CompileError):
    """An entry of ``options={...}`` that does not exist, or whose value is of the wrong kind or none of the
    choices."""

    def __init__(self, name: str, value: Any, accepted: str, *, hint: str = "") -> None:
        self.name = name
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        what = "`options`" if name == "options" else f"option {name!r}"
        super().__init__(
            f"{what} is {shown} (a {type(value).__name__}), but has to be {accepted}.",
            hints=[hint] if hint else [],
        )

    @classmethod
    def unknown(cls, name: Any, existing: Sequence[str]) -> InvalidOption:
        """For a name that is none of `existing`."""
        error = cls.__new__(cls)
        error.name = str(name)
        close = difflib.get_close_matches(str(name), existing, n=1)
        CompileError.__init__(
            error,
            f"option {name!r} does not exist." + (f" Did you mean {close[0]!r}?" if close else ""),
            hints=[f"the options are: {', '.join(existing)}"],
        )
        return error


class DebugFolderUnusable(CompileError):
    """The folder of ``debug_dir`` or ``ZECO_DEBUG`` cannot be made or written to."""

    def __init__(self, folder: Any, reason: OSError) -> None:
        self.folder = str(folder)
        super().__init__(
            f"the debug folder {self.folder} cannot be written to: {reason.strerror or reason}.",
            hints=[
                'give another folder as options={"debug_dir": ...} or in the environment variable '
                "ZECO_DEBUG, or leave both out to write nothing",
            ],
        )


class InvalidTrace(ZecoError):
    """A file that is no trace of torch.profiler, or one with nothing in it to draw."""
