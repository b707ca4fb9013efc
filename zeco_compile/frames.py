"""Room for the frames of Python's calls, where very many are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_WORDS = 66_000
"""More than half of a megabyte, so that Python maps a whole one."""


def roomy(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, behind a frame so large that the memory mapped for it has half a megabyte for those of its calls.

    CPython keeps frames in pieces of 16 KiB that it maps when a call needs one and unmaps when that call returns. A
    loop at the end of a piece does so at every call: a tenth of the time that compilations took, all of it the
    kernel's. A piece that is made for a large frame is large itself.
    """

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return functools.wraps(function)(call)
