"""The base of every error that zeco_compile raises.

It lives in the lowest folder so that each of the others can derive its own errors from it;
users import all of them from ``zeco_compile`` or ``zeco_compile.errors``.
"""

from __future__ import annotations


class ZecoError(RuntimeError):
    """Base class. The message says what was found, where, and what to do about it."""


class InvalidShapes(ZecoError):
    """q, k, v, g or the initial state do not fit each other."""
